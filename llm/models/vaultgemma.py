"""VaultGemma: Gemma 2 without the norms behind the parts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, PreNorms
from llm.models.gemma2 import Gemma2ForCausalLM

_LAYER = "model.layers.*"


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (f"{_LAYER}.pre_feedforward_layernorm", f"{_LAYER}.post_attention_layernorm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        config = super().read_config(reader)
        if config.final_norm is None:
            raise RuntimeError("Gemma 2 has a final norm")
        norms = PreNorms(config.final_norm)
        return replace(config, layers=tuple(replace(layer, norms=norms) for layer in config.layers))
