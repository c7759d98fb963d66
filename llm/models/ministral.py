"""Ministral 8B: Mistral with a window on some layers only."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreNorms,
    layer_windows,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class MinistralForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm, heads = reader.rope(), read_rms_norm(reader), read_heads(reader, default_kv_heads=8)
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))
        count, window = reader.positive("num_hidden_layers"), reader.optional_integer("sliding_window", 4096)
        windows = layer_windows(reader, count, window, [window is not None] * count)
        layers = [
            LayerConfig(attention=AttentionConfig(heads, rope, size), mlp=mlp, norms=PreNorms(norm)) for size in windows
        ]
        return read_decoder(reader, layers, norm, positions=longest_sequence(reader, rope, 131072))
