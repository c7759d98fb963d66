"""Qwen3-Next: the gated delta rule in most layers, gated attention in the others, and experts with a shared one."""

from __future__ import annotations

from typing import ClassVar

from llm.layers.linear_attention.gated_delta_net import DeltaHeads
from llm.layers.norm import GemmaRMSNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PartConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.decoder.multi_token import MultiTokenConfig
from llm.models.decoder.recurrent import GatedDeltaConfig, attending_layers
from llm.models.reading_experts import qwen_experts, sparse_layers

SHARED_EXPERT_OF_MTP = (("mtp.layers.*.mlp.shared_expert", "mtp.layers.*.mlp.shared_experts.0"),)


class Qwen3NextForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.linear_attn", "model.layers.*.self_attn"),
        ("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),
        *SHARED_EXPERT_OF_MTP,
    )

    @staticmethod
    def ignores_weight(name: str) -> bool:
        return predicts_second_token(name)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        dense = GatedMLPConfig(reader.positive("intermediate_size", 5632), reader.string("hidden_act", "silu"))
        sparse = qwen_experts(reader)
        return qwen_hybrid(reader, "qwen_next", [sparse if is_sparse else dense for is_sparse in sparse_layers(reader)])


def predicts_second_token(name: str) -> bool:
    """True for weights of the layer that does, which the model has if it drafts."""
    return name.startswith("mtp.")


def qwen_hybrid(reader: ConfigReader, kind: str, mlps: list[PartConfig], kv_heads: int = 2) -> DecoderConfig:
    """A decoder with these feed-forwards, one per layer; `kind` of `GatedDeltaConfig`."""
    # config.json of a published model names the type of the state, and what transformers fixes.
    reader.expect("mamba_ssm_dtype", "float32")
    reader.expect("attn_output_gate", True)
    rope, norm = reader.rope(default_share=0.25), read_rms_norm(reader, kind=GemmaRMSNorm)
    heads, bias = (
        read_heads(reader, default_kv_heads=kv_heads, default_size=256),
        reader.boolean("attention_bias", False),
    )
    attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, gated=True)
    reader.expect("hidden_act", "silu")
    sizes = DeltaHeads(
        reader.positive("linear_num_key_heads", 16),
        reader.positive("linear_num_value_heads", 32),
        reader.positive("linear_key_head_dim", 128),
        reader.positive("linear_value_head_dim", 128),
    )
    linear = GatedDeltaConfig(kind, sizes, reader.positive("linear_conv_kernel_dim", 4), norm.eps)
    layers = [
        LayerConfig(attention=attention if attends else linear, mlp=mlp, norms=PreNorms(norm))
        for attends, mlp in zip(attending_layers(reader, len(mlps)), mlps, strict=True)
    ]
    predicting = LayerConfig(attention=attention, mlp=mlps[0], norms=PreNorms(norm))
    return read_decoder(
        reader,
        layers,
        norm,
        positions=longest_sequence(reader, rope, 32768),
        multi_token=MultiTokenConfig(predicting, norm, "mtp", False),
    )
