"""OLMo Hybrid: the gated delta rule, and in some layers OLMo 3's attention, in published models without rope."""

from __future__ import annotations

from typing import ClassVar

from llm.layers.linear_attention.gated_delta_net import DeltaHeads
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PostNorms,
    PreNorms,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.decoder.recurrent import GatedDeltaConfig, attending_layers

# Of the output of a head, whatever rms_norm_eps is.
_HEAD_EPS = 1e-5


class OlmoHybridForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **DecoderForCausalLM.packed_modules_mapping,
        "ba_proj": ["b_proj", "a_proj"],
        "conv1d": ["q_conv1d", "k_conv1d", "v_conv1d"],
    }
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.linear_attn", "model.layers.*.self_attn"),
        ("model.layers.*.attention_layer_norm", "model.layers.*.input_layernorm"),
        ("model.layers.*.feedforward_layer_norm", "model.layers.*.post_attention_layernorm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        for key in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"):
            reader.expect(key, reader.raw.get(key))  # of training
        norm, heads = read_rms_norm(reader), read_heads(reader)
        bias = reader.boolean("attention_bias", False)
        rope = reader.rope() if _rotates(reader) else None
        attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads")
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))
        linear = _delta(reader, heads.query)
        count = reader.positive("num_hidden_layers")
        default = [index % 4 == 3 for index in range(count - 1)] + [count < 4 or count % 4 == 0]
        layers = [
            LayerConfig(attention=attention, mlp=mlp, norms=PostNorms(norm))
            if attends
            else LayerConfig(attention=linear, mlp=mlp, norms=PreNorms(norm))
            for attends in attending_layers(reader, count, default)
        ]
        return read_decoder(reader, layers, norm, positions=reader.positive("max_position_embeddings", 65536))


def _rotates(reader: ConfigReader) -> bool:
    """Published models have no rope: their `rope_parameters` are null, or without a theta."""
    parameters = reader.nested("rope_parameters")
    return (parameters.get("rope_theta") or reader.raw.get("rope_theta")) is not None


def _delta(reader: ConfigReader, attention_heads: int) -> GatedDeltaConfig:
    key_heads = reader.positive("linear_num_key_heads", attention_heads)
    size = reader.positive("linear_key_head_dim", int(0.75 * reader.positive("hidden_size") / key_heads))
    heads = DeltaHeads(
        key_heads,
        reader.positive("linear_num_value_heads", attention_heads),
        size,
        reader.positive("linear_value_head_dim", 2 * size),
    )
    scale = 2.0 if reader.boolean("linear_allow_neg_eigval", True) else 1.0
    return GatedDeltaConfig(
        "olmo_hybrid", heads, reader.positive("linear_conv_kernel_dim", 4), _HEAD_EPS, beta_scale=scale
    )
