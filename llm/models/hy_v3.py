"""Hunyuan 3: QK norm per head, and experts chosen by sigmoid scores with a bias."""

from __future__ import annotations

from typing import ClassVar

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
from llm.models.reading_experts import ignore_training, layers_with_experts

_MLP, _BIAS = "model.layers.*.mlp", "e_score_correction_bias"


class HYV3ForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (f"{_MLP}.{_BIAS}", f"{_MLP}.gate.{_BIAS}"),
        (f"{_MLP}.expert_bias", f"{_MLP}.gate.{_BIAS}"),
        (f"{_MLP}.router.gate", f"{_MLP}.gate"),
        (f"{_MLP}.shared_mlp", f"{_MLP}.shared_experts"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        reader.ignore("enable_moe_fp32_combine")  # everything is added in float32
        rope, norm = reader.rope(11_158_840.0), read_rms_norm(reader, 1e-5)
        heads = read_heads(reader, default_kv_heads=8, default_size=128)
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        activation, inner = reader.string("hidden_act", "silu"), reader.positive("moe_intermediate_size", 1536)
        attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm)
        dense = GatedMLPConfig(reader.positive("intermediate_size"), activation, mlp_bias)
        sparse = MoEConfig(
            reader.positive("num_experts", 192),
            reader.positive("num_experts_per_tok", 8),
            inner,
            activation,
            scoring="sigmoid",
            correction_bias=True,
            routed_scaling_factor=reader.number("router_scaling_factor", 2.826),
            shared_size=inner * reader.positive("num_shared_experts", 1),
            shared_bias=mlp_bias,
        )
        layers = [
            LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=PreNorms(norm))
            for is_sparse in layers_with_experts(reader, 1)
        ]
        return read_decoder(reader, layers, norm, positions=longest_sequence(reader, rope, 131_072))
