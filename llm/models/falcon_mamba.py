"""Falcon Mamba: Mamba with steps, B and C normalised."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.mamba import MambaForCausalLM, mamba_decoder, read_mamba


class FalconMambaForCausalLM(MambaForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return mamba_decoder(reader, read_mamba(reader, reader.positive_number("mixer_rms_eps", 1e-6)))
