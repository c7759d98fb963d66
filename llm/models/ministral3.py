"""Ministral 3: Llama with YaRN and queries scaled by position beyond the original context."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, QueryScale, read_heads, read_rms_norm
from llm.models.llama import llama_decoder


class Ministral3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope(others=("llama_4_scaling_beta", "max_position_embeddings"))
        return llama_decoder(
            reader,
            read_heads(reader, default_kv_heads=8, default_size=128),
            rope,
            read_rms_norm(reader, 1e-5),
            positions=262144,
            sliding_window=reader.optional_integer("sliding_window"),
            query_scale=QueryScale(_beta(reader), rope.original_max_position_embeddings),
        )


def _beta(reader: ConfigReader) -> float:
    given = reader.raw.get("rope_parameters", {})
    return ConfigReader(given if isinstance(given, dict) else {}).number("llama_4_scaling_beta")
