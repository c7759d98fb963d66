"""ERNIE 4.5, dense: Llama with an interleaved rotary embedding."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_heads, read_rms_norm
from llm.models.llama import llama_decoder


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        bias = reader.boolean("use_bias", False)
        return llama_decoder(
            reader,
            read_heads(reader, default_kv_heads=2, default_size=128),
            reader.rope(500_000.0),
            read_rms_norm(reader, 1e-5),
            positions=131072,
            tied=True,
            rope_interleaved=True,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
