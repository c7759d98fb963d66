"""Gemma 3 multimodal (4B, 12B, 27B): its language model."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.gemma3_text import Gemma3ForCausalLM
from llm.models.text_part import TextPart, read_text_part

# The published files leave out what equals these.
_DEFAULTS: dict[str, object] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_OTHERS = ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")


class Gemma3ForConditionalGeneration(TextPart, Gemma3ForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Gemma3ForCausalLM, _DEFAULTS, _OTHERS)
