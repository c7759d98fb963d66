"""Mellum 2: Qwen 3 with experts, and a window with a rotary embedding of its own on some layers."""

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
    layer_windows,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.reading_experts import ignore_training, layers_with_experts


class MellumForCausalLM(DecoderForCausalLM):
    left_out = ("mtp",)  # a layer that predicts a second token

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        reader.ignore("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        full, sliding = reader.rope(500_000.0, "full_attention"), reader.rope(10_000.0, "sliding_attention")
        norm, heads = read_rms_norm(reader), read_heads(reader, default_kv_heads=4, default_size=128)
        bias, activation = reader.boolean("attention_bias", False), reader.string("hidden_act", "silu")
        count, window = reader.positive("num_hidden_layers"), reader.optional_integer("sliding_window", 1024)
        dense = GatedMLPConfig(reader.positive("intermediate_size", 7168), activation)
        sparse = MoEConfig(
            reader.positive("num_experts", reader.positive("num_local_experts", 64)),
            reader.positive("num_experts_per_tok", 8),
            reader.positive("moe_intermediate_size", 896),
            activation,
            renormalize=reader.boolean("norm_topk_prob", True),
        )

        def layer(size: int | None, is_sparse: bool) -> LayerConfig:
            attention = AttentionConfig(
                heads, sliding if size else full, size, qkv_bias=bias, out_bias=bias, qk_norm=norm
            )
            return LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=PreNorms(norm))

        windows = layer_windows(reader, count, window, [False] * count)
        layers = map(layer, windows, layers_with_experts(reader, 0))
        return read_decoder(reader, layers, norm, positions=longest_sequence(reader, full, 131_072))
