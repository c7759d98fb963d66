"""Llama 4 multimodal (Scout, Maverick): its language model."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.llama4_text import Llama4ForCausalLM
from llm.models.text_part import TextPart, in_text_part, read_text_part

_OTHERS = ("boi_token_index", "eoi_token_index", "image_token_index")


class Llama4ForConditionalGeneration(TextPart, Llama4ForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*in_text_part(Llama4ForCausalLM.renames), *TextPart.renames)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return read_text_part(reader, Llama4ForCausalLM, {}, _OTHERS)
