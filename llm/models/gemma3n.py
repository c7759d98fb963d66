"""Gemma 3n multimodal (E2B, E4B): its language model."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.gemma3n_text import Gemma3nForCausalLM
from llm.models.text_part import TextPart, in_text_part, read_text_part

_OTHERS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "boa_token_id", "eoa_token_id", "audio_token_id"),
    *("audio_config", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"),
)


class Gemma3nForConditionalGeneration(TextPart, Gemma3nForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*in_text_part(Gemma3nForCausalLM.renames), *TextPart.renames)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Gemma3nForCausalLM, {}, _OTHERS)
