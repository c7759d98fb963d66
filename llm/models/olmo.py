"""OLMo 1 to 3, OLMoE, FlexOlmo and OLMo Hybrid."""

from dataclasses import replace
from typing import ClassVar

from llm.models import decoder as d


class OlmoForCausalLM(d.DecoderForCausalLM):
    """OLMo 1: Llama with LayerNorm without weight and bias; some checkpoints clamp queries, keys and values."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.NormConfig(1e-5, d.LayerNorm, has_weight=False, has_bias=False)
        attention = d.read_attention(reader, reader.rope(), qkv_limit=reader.optional_number("clip_qkv"))
        return d.uniform_decoder(reader, attention, norm)


class Olmo2ForCausalLM(d.DecoderForCausalLM):
    """OLMo 2: norms on the parts' outputs, queries and keys normalised over all heads together."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.read_rms_norm(reader, 1e-5)
        attention = d.read_attention(reader, reader.rope(), qk_norm=norm, qk_norm_over="all heads")
        return d.uniform_decoder(reader, attention, norm, norms=d.PostNorms(norm))


_THETA = 500_000.0


class Olmo3ForCausalLM(d.DecoderForCausalLM):
    """OLMo 3: OLMo 2 with a window on three of four layers, whose rope is not scaled."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm, (full, sliding) = d.read_rms_norm(reader, 1e-5), _ropes(reader)
        attention = d.read_attention(reader, full, qk_norm=norm, qk_norm_over="all heads")
        parts = [
            attention if size is None else replace(attention, rope=sliding, sliding_window=size)
            for size in d.windows_by_pattern(reader, 4)
        ]
        return d.uniform_decoder(reader, parts, norm, norms=d.PostNorms(norm), rope=full)


def _ropes(reader: d.ConfigReader) -> tuple[d.RopeParameters, d.RopeParameters]:
    """(full attention, sliding attention): by layer type since transformers 5; before, only the first is scaled."""
    if "full_attention" in reader.raw.get("rope_parameters", {}):
        return reader.rope(_THETA, "full_attention"), reader.rope(_THETA, "sliding_attention")
    return reader.rope(_THETA), d.RopeParameters(theta=reader.positive_number("rope_theta", _THETA, above=1.0))


class OlmoeForCausalLM(d.DecoderForCausalLM):
    """OLMoE: queries and keys normalised over all heads together, experts in every layer."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("clip_qkv", None)
        norm = d.read_rms_norm(reader, 1e-5)
        return _with_experts(reader, reader.rope(), norm, d.PreNorms(norm), 64, 8)


class FlexOlmoForCausalLM(d.DecoderForCausalLM):
    """FlexOlmo: OLMo 2 with experts."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.read_rms_norm(reader)
        return _with_experts(reader, reader.rope(500_000.0), norm, d.PostNorms(norm), 7, 5)


# Of the output of a head, whatever rms_norm_eps is.
_HEAD_EPS = 1e-5


def _with_experts(
    reader: d.ConfigReader, rope: d.RopeParameters, norm: d.NormConfig, norms: d.Norms, count: int, best: int
) -> d.DecoderConfig:
    """OLMo 2's attention and experts; `count` and `best` of them are defaults."""
    renormalize = reader.boolean("norm_topk_prob", False)
    mlp = d.read_experts(reader, count, best, size_key="intermediate_size", renormalize=renormalize)
    attention = d.read_attention(reader, rope, qk_norm=norm, qk_norm_over="all heads")
    return d.uniform_decoder(reader, attention, norm, mlp=mlp, norms=norms, positions=4096)


class OlmoHybridForCausalLM(d.DecoderForCausalLM):
    """OLMo Hybrid: the gated delta rule, and in some layers OLMo 3's attention, in published models without rope."""

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
        rope = reader.rope() if _rotates(reader) else None
        attention = d.read_attention(reader, rope, heads, qk_norm=norm, qk_norm_over="all heads")
        mlp = d.read_gated_mlp(reader)
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
