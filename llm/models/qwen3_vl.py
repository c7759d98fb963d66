"""Qwen 3 VL: its language model, Qwen 3."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.qwen3 import Qwen3ForCausalLM
from llm.models.text_part import TextPart, read_text_part

_OTHERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3VLForConditionalGeneration(TextPart, Qwen3ForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Qwen3ForCausalLM, {}, _OTHERS)
