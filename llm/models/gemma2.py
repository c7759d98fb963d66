"""Gemma 2: norms around both blocks, soft caps, a window on every other layer, scaled embeddings."""

from __future__ import annotations

from typing import Any

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, LayerConfig, decoder_sizes, layer_windows
from llm.models.config_reader import ConfigReader


class Gemma2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        count = reader.positive("num_hidden_layers")
        window = reader.optional_integer("sliding_window", 4096)
        reader.expect("sliding_window_size", window)  # its first name, which gemma-2-9b and 27b carry too
        windows = layer_windows(reader, count, window, [index % 2 == 0 for index in range(count)])
        config = DecoderConfig(
            **gemma_parameters(reader),
            max_position_embeddings=reader.positive("max_position_embeddings", 8192),
            layers=tuple(LayerConfig(size, rope) for size in windows),
            attention_soft_cap=_soft_cap(reader, "attn_logit_softcapping", 50.0),
            logits_soft_cap=_soft_cap(reader, "final_logit_softcapping", 30.0),
        )
        reader.finish()
        return config


def gemma_parameters(reader: ConfigReader) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    reader.expect("use_bidirectional_attention", False)
    bias = reader.boolean("attention_bias", False)
    sizes = decoder_sizes(reader, default_kv_heads=4)
    return {
        **sizes,
        "head_size": reader.positive("head_dim", 256),
        "norm": "gemma_rms_norm",
        "norm_placement": "both",
        "activation": _activation(reader),
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": sizes["hidden_size"] ** 0.5,
        "tie_word_embeddings": reader.boolean("tie_word_embeddings", True),
    }


def _activation(reader: ConfigReader) -> str:
    # The first releases also carry a `hidden_act` that transformers does not read.
    reader.expect("hidden_act", "gelu", "gelu_pytorch_tanh")
    return reader.string("hidden_activation", "gelu_pytorch_tanh")


def _soft_cap(reader: ConfigReader, key: str, default: float) -> float | None:
    return reader.optional_number(key) if key in reader.given else default
