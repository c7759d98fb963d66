"""Qwen 2 and 2.5 VL: their language model, Qwen 2."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.qwen2 import Qwen2ForCausalLM
from llm.models.text_part import TextPart, read_text_part

_OTHERS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)


class Qwen2_5_VLForConditionalGeneration(TextPart, Qwen2ForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(nested(reader, _OTHERS), Qwen2ForCausalLM, {}, _OTHERS)


def nested(reader: ConfigReader, others: tuple[str, ...]) -> ConfigReader:
    """The first releases have the keys of the language model beside those of the others."""
    if "text_config" in reader.raw:
        return reader
    outside = {key: value for key, value in reader.decoded.items() if key in (*others, "vision_config")}
    text = {key: value for key, value in reader.decoded.items() if key not in outside}
    return ConfigReader({**outside, "model_type": reader.family, "text_config": text})
