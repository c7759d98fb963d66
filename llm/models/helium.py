"""Helium: Llama with an interleaved rotary embedding."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_heads, read_rms_norm
from llm.models.llama import llama_decoder


class HeliumForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return llama_decoder(
            reader,
            read_heads(reader, default_kv_heads=20, default_size=128),
            reader.rope(100_000.0),
            read_rms_norm(reader, 1e-8),
            positions=4096,
            rope_interleaved=True,
            qkv_bias=reader.boolean("attention_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
        )
