"""OLMo 1: Llama with LayerNorm without weight and bias; some checkpoints clamp queries, keys and values."""

from __future__ import annotations

from typing import ClassVar

from llm.models import decoder as d
from llm.models.llama import llama_decoder


class OlmoForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.NormConfig(1e-5, d.LayerNorm, has_weight=False, has_bias=False)
        bias, limit = reader.boolean("attention_bias", False), reader.optional_number("clip_qkv")
        return llama_decoder(
            reader, d.read_heads(reader), reader.rope(), norm, qkv_bias=bias, out_bias=bias, qkv_limit=limit
        )


class Olmo2ForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        bias = reader.boolean("attention_bias", False)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads"
            ),
            mlp=d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=d.PostNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope))


_THETA = 500_000.0


class Olmo3ForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm, heads, bias = d.read_rms_norm(reader, 1e-5), d.read_heads(reader), reader.boolean("attention_bias", False)
        full, sliding = _ropes(reader)
        mlp = d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))

        def layer(window: int | None) -> d.LayerConfig:
            attention = d.AttentionConfig(
                heads,
                full if window is None else sliding,
                window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm,
                qk_norm_over="all heads",
            )
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PostNorms(norm))

        layers = [layer(window) for window in d.windows_by_pattern(reader, 4096, 4)]
        return d.read_decoder(reader, layers, norm, positions=d.longest_sequence(reader, full))


def _ropes(reader: d.ConfigReader) -> tuple[d.RopeParameters, d.RopeParameters]:
    """(full attention, sliding attention): by layer type since transformers 5; before, only the first is scaled."""
    if "full_attention" in reader.raw.get("rope_parameters", {}):
        return reader.rope(_THETA, "full_attention"), reader.rope(_THETA, "sliding_attention")
    return reader.rope(_THETA), d.RopeParameters(theta=reader.positive_number("rope_theta", _THETA, above=1.0))


class OlmoeForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.expect("clip_qkv", None)
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        bias = reader.boolean("attention_bias", False)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads"
            ),
            mlp=d.MoEConfig(
                reader.positive("num_experts", 64),
                reader.positive("num_experts_per_tok", 8),
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
                renormalize=reader.boolean("norm_topk_prob", False),
            ),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 4096))


class FlexOlmoForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        rope, norm = reader.rope(500_000.0), d.read_rms_norm(reader)
        bias = reader.boolean("attention_bias", False)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads"
            ),
            mlp=d.MoEConfig(
                reader.positive("num_experts", 7),
                reader.positive("num_experts_per_tok", 5),
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
                renormalize=reader.boolean("norm_topk_prob", False),
            ),
            norms=d.PostNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 4096))


# Of the output of a head, whatever rms_norm_eps is.
_HEAD_EPS = 1e-5


class OlmoHybridForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **d.DecoderForCausalLM.packed_modules_mapping,
        "ba_proj": ["b_proj", "a_proj"],
        "conv1d": ["q_conv1d", "k_conv1d", "v_conv1d"],
    }
    renames = (
        ("model.layers.*.linear_attn", "model.layers.*.self_attn"),
        ("model.layers.*.attention_layer_norm", "model.layers.*.input_layernorm"),
        ("model.layers.*.feedforward_layer_norm", "model.layers.*.post_attention_layernorm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        for key in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"):
            reader.expect(key, reader.raw.get(key))  # of training
        norm, heads = d.read_rms_norm(reader), d.read_heads(reader)
        bias = reader.boolean("attention_bias", False)
        rope = reader.rope() if _rotates(reader) else None
        attention = d.AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads")
        mlp = d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))
        linear = _delta(reader, heads.query)
        count = reader.positive("num_hidden_layers")
        default = [index % 4 == 3 for index in range(count - 1)] + [count < 4 or count % 4 == 0]
        layers = [
            d.LayerConfig(attention=attention, mlp=mlp, norms=d.PostNorms(norm))
            if attends
            else d.LayerConfig(attention=linear, mlp=mlp, norms=d.PreNorms(norm))
            for attends in d.attending_layers(reader, count, default)
        ]
        return d.read_decoder(reader, layers, norm, positions=reader.positive("max_position_embeddings", 65536))


def _rotates(reader: d.ConfigReader) -> bool:
    """Published models have no rope: their `rope_parameters` are null, or without a theta."""
    parameters = reader.nested("rope_parameters")
    return (parameters.get("rope_theta") or reader.raw.get("rope_theta")) is not None


def _delta(reader: d.ConfigReader, attention_heads: int) -> d.GatedDeltaConfig:
    key_heads = reader.positive("linear_num_key_heads", attention_heads)
    size = reader.positive("linear_key_head_dim", int(0.75 * reader.positive("hidden_size") / key_heads))
    heads = d.DeltaHeads(
        key_heads,
        reader.positive("linear_num_value_heads", attention_heads),
        size,
        reader.positive("linear_value_head_dim", 2 * size),
    )
    scale = 2.0 if reader.boolean("linear_allow_neg_eigval", True) else 1.0
    return d.GatedDeltaConfig(
        "olmo_hybrid", heads, reader.positive("linear_conv_kernel_dim", 4), _HEAD_EPS, beta_scale=scale
    )
