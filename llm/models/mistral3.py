"""Mistral Small 3.1 and later, Ministral 3: their language model, which is Mistral or Ministral 3."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM
from llm.models.ministral3 import Ministral3ForCausalLM
from llm.models.mistral import MistralForCausalLM
from llm.models.text_part import TextPart, read_text_part

_FAMILIES: dict[str, type[DecoderForCausalLM]] = {"mistral": MistralForCausalLM, "ministral3": Ministral3ForCausalLM}
_DEFAULTS: dict[str, object] = {"model_type": "mistral", "sliding_window": None}
_OTHERS = (
    "image_token_index",
    "image_token_id",
    "projector_hidden_act",
    "vision_feature_layer",
    "multimodal_projector_bias",
    "spatial_merge_size",
)


class Mistral3ForConditionalGeneration(TextPart, MistralForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        kind = str(reader.nested("text_config").get("model_type", "mistral"))
        if kind not in _FAMILIES:
            raise reader.error("model_type of text_config", kind, " or ".join(map(repr, _FAMILIES)))
        return read_text_part(reader, _FAMILIES[kind], _DEFAULTS, _OTHERS)
