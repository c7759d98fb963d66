"""OLMo 1: Llama with LayerNorm without weight and bias; some checkpoints clamp queries, keys and values."""

from __future__ import annotations

from llm.layers.norm import LayerNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, NormConfig, read_heads
from llm.models.llama import llama_decoder


class OlmoForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        norm = NormConfig(1e-5, LayerNorm, has_weight=False, has_bias=False)
        bias, limit = reader.boolean("attention_bias", False), reader.optional_number("clip_qkv")
        return llama_decoder(
            reader, read_heads(reader), reader.rope(), norm, qkv_bias=bias, out_bias=bias, qkv_limit=limit
        )
