"""Qwen 3 MoE: Qwen 3 with experts in all layers, or in those that config.json names."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    MoEConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.reading_experts import ignore_training, sparse_layers


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        rope, norm = reader.rope(), read_rms_norm(reader)
        heads, bias = read_heads(reader, default_kv_heads=4), reader.boolean("attention_bias", False)
        # transformers gives every layer a window or none.
        uses_window = reader.boolean("use_sliding_window", False)
        window = reader.optional_integer("sliding_window", 4096)
        reader.integer("max_window_layers", 0)
        activation = reader.string("hidden_act", "silu")
        dense = GatedMLPConfig(reader.positive("intermediate_size", 6144), activation)
        sparse = MoEConfig(
            reader.positive("num_experts", reader.positive("num_local_experts", 128)),
            reader.positive("num_experts_per_tok", 8),
            reader.positive("moe_intermediate_size", 768),
            activation,
            renormalize=reader.boolean("norm_topk_prob", False),
        )

        def layer(is_sparse: bool) -> LayerConfig:
            attention = AttentionConfig(
                heads, rope, window if uses_window else None, qkv_bias=bias, out_bias=bias, qk_norm=norm
            )
            return LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=PreNorms(norm))

        return read_decoder(
            reader, map(layer, sparse_layers(reader)), norm, positions=longest_sequence(reader, rope, 32768)
        )
