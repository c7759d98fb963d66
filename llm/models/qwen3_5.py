"""Qwen 3.5: its language model."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.qwen3_5_text import Qwen3_5ForCausalLM
from llm.models.text_part import TextPart, in_text_part, read_text_part

IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3_5ForConditionalGeneration(TextPart, Qwen3_5ForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*in_text_part(Qwen3_5ForCausalLM.renames), *TextPart.renames)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Qwen3_5ForCausalLM, {}, IMAGES)
