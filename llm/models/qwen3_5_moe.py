"""Qwen 3.5 with experts: its language model."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.qwen3_5 import IMAGES
from llm.models.qwen3_5_moe_text import Qwen3_5MoeForCausalLM
from llm.models.qwen3_next import SHARED_EXPERT_OF_MTP
from llm.models.text_part import TextPart, in_text_part, read_text_part


class Qwen3_5MoeForConditionalGeneration(TextPart, Qwen3_5MoeForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *SHARED_EXPERT_OF_MTP,
        *in_text_part(Qwen3_5MoeForCausalLM.renames),
        *TextPart.renames,
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Qwen3_5MoeForCausalLM, {}, IMAGES)
