"""Gemma 4 multimodal (E2B, E4B, 26B-A4B, 31B): its language model."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.gemma4_text import Gemma4ForCausalLM
from llm.models.text_part import TextPart, in_text_part, read_text_part

_OTHERS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id", "eoa_token_index"),
    *("audio_token_id", "audio_config", "eoa_token_id"),
)


class Gemma4ForConditionalGeneration(TextPart, Gemma4ForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*in_text_part(Gemma4ForCausalLM.renames), *TextPart.renames)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Gemma4ForCausalLM, {}, _OTHERS)
