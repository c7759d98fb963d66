"""Gemma 1: Llama with Gemma's RMS norm, scaled embeddings and GeGLU."""

from __future__ import annotations

from llm.layers.norm import GemmaRMSNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class GemmaForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("use_bidirectional_attention", False)
        # The first releases say "gelu" and mean its tanh form, which is what they were trained with.
        for key in ("hidden_act", "hidden_activation"):
            reader.expect(key, "gelu", "gelu_pytorch_tanh")
        rope, norm = reader.rope(), read_rms_norm(reader, kind=GemmaRMSNorm)
        heads, bias = read_heads(reader, default_kv_heads=16, default_size=256), reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), "gelu_pytorch_tanh"),
            norms=PreNorms(norm),
        )
        return read_decoder(
            reader,
            layer,
            norm,
            positions=longest_sequence(reader, rope, 8192),
            embedding_multiplier=reader.positive("hidden_size") ** 0.5,
            tied=True,
        )
