"""Seed-OSS: Llama with a QKV bias."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_heads, read_rms_norm
from llm.models.llama import llama_decoder


class SeedOssForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("residual_dropout", reader.raw.get("residual_dropout"))
        return llama_decoder(
            reader,
            read_heads(reader, default_kv_heads=8, default_size=128),
            reader.rope(),
            read_rms_norm(reader),
            positions=524288,
            qkv_bias=reader.boolean("attention_bias", True),
            out_bias=reader.boolean("attention_out_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
        )
