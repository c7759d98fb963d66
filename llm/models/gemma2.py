"""Gemma 2: norms before and after both parts, soft caps, a sliding window on every other layer, scaled embeddings."""

from __future__ import annotations

from dataclasses import replace

from llm.layers.norm import GemmaRMSNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreAndPostNorms,
    layer_windows,
    read_heads,
    read_rms_norm,
)


class Gemma2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        count = reader.positive("num_hidden_layers")
        window = reader.optional_integer("sliding_window", 4096)
        reader.expect("sliding_window_size", window)  # its first name, which gemma-2-9b and 27b also have
        windows = layer_windows(reader, count, window, [index % 2 == 0 for index in range(count)])
        reader.expect("use_bidirectional_attention", False)
        soft_cap = reader.optional_number("attn_logit_softcapping", 50.0)
        attention = replace(gemma_attention(reader), rope=reader.rope(), soft_cap=soft_cap)
        config = gemma_decoder(
            reader,
            [replace(attention, sliding_window=size) for size in windows],
            positions=reader.positive("max_position_embeddings", 8192),
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 30.0),
        )
        reader.finish()
        return config


def gemma_attention(reader: ConfigReader) -> AttentionConfig:
    """The attention config that Gemma 2 and 3 have in common."""
    bias = reader.boolean("attention_bias", False)
    return AttentionConfig(
        read_heads(reader, default_kv_heads=4, default_size=256),
        qkv_bias=bias,
        out_bias=bias,
        scale=reader.positive_number("query_pre_attn_scalar", 256) ** -0.5,
    )


def gemma_decoder(
    reader: ConfigReader, attention: list[AttentionConfig], *, positions: int, logits_soft_cap: float | None
) -> DecoderConfig:
    """The decoder around the attention layers."""
    # The first releases also have a `hidden_act` that transformers does not read.
    reader.expect("hidden_act", "gelu", "gelu_pytorch_tanh")
    activation = reader.string("hidden_activation", "gelu_pytorch_tanh")
    mlp = GatedMLPConfig(reader.positive("intermediate_size"), activation)
    norm = read_rms_norm(reader, kind=GemmaRMSNorm)
    hidden_size = reader.positive("hidden_size")
    return DecoderConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=positions,
        layers=tuple(LayerConfig(attention=part, mlp=mlp, norms=PreAndPostNorms(norm)) for part in attention),
        final_norm=norm,
        embedding_multiplier=hidden_size**0.5,
        logits_soft_cap=logits_soft_cap,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
    )
