"""DeepSeek V2, V3 and R1, and families with DeepSeek V3's experts under an attention of their own."""

from collections.abc import Sequence
from dataclasses import replace

from llm.models import decoder as d

_MOST_FURTHER_LAYERS = 64


class DeepseekV2ForCausalLM(d.DecoderForCausalLM):
    """DeepSeek V2: latent attention, dense layers first, then experts of which the best groups take part."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # transformers reads neither of them otherwise.
        reader.expect("scoring_func", "softmax")
        reader.expect("norm_topk_prob", False)
        rope = reader.rope()
        method, groups, best = _groups(reader)
        experts = d.MoEConfig(
            reader.positive("n_routed_experts", 64),
            reader.positive("num_experts_per_tok"),
            reader.positive("moe_intermediate_size", 1407),
            reader.string("hidden_act", "silu"),
            renormalize=False,
            groups=groups if method == "group_limited_greedy" else 1,
            topk_group=best if method == "group_limited_greedy" else 1,
            routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
            shared_size=shared_size(reader, 2, 1407),
        )
        first = reader.count("first_k_dense_replace", 0)
        return deepseek_decoder(
            reader, rope, d.read_latent_attention(reader, rope), experts, dense_first(reader, first)
        )


def _groups(reader: d.ConfigReader) -> tuple[str, int, int]:
    method = reader.string("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error("topk_method", method, "'greedy' or 'group_limited_greedy'")
    return method, reader.positive("n_group", 1), reader.positive("topk_group", 1)


def shared_size(reader: d.ConfigReader, count: int, size: int) -> int:
    """Channels of the experts that every token has, which are one feed-forward; the arguments are defaults."""
    return reader.positive("n_shared_experts", count) * reader.positive("moe_intermediate_size", size)


def dense_first(reader: d.ConfigReader, first: int) -> list[bool]:
    """Which layers have experts: all but the first."""
    return [index >= first for index in range(reader.positive("num_hidden_layers"))]


def deepseek_decoder(
    reader: d.ConfigReader,
    rope: d.RopeParameters,
    attention: d.PartConfig | Sequence[d.PartConfig],
    experts: d.MoEConfig,
    is_sparse: list[bool],
    eps: float = 1e-6,
    positions: int = 2048,
) -> d.DecoderConfig:
    """A decoder in which the layers of `is_sparse` have `experts`, the others a feed-forward; `attention` is one for
    all layers or one each; `positions`: what a missing `max_position_embeddings` means."""
    d.ignore_training(reader)
    for key in ("aux_loss_alpha", "seq_aux", "ep_size"):  # of training
        reader.expect(key, reader.raw.get(key))
    reader.expect("moe_layer_freq", 1)
    reader.expect("mlp_bias", False)
    further = reader.count("num_nextn_predict_layers", 0)
    if not 0 <= further <= _MOST_FURTHER_LAYERS:
        raise reader.error("num_nextn_predict_layers", further, f"an integer from 0 to {_MOST_FURTHER_LAYERS}")
    norm = d.read_rms_norm(reader, eps)
    activation = reader.string("hidden_act", "silu")
    dense: d.PartConfig = experts
    reader.ignore("intermediate_size")  # where all layers have experts it is not needed, nor always there
    if not all(is_sparse):
        dense = d.GatedMLPConfig(reader.positive("intermediate_size"), activation)
    parts = [attention] * len(is_sparse) if isinstance(attention, d.PartConfig) else attention
    predicting = d.LayerConfig(attention=parts[-1], mlp=experts, norms=d.PreNorms(norm))
    return d.read_decoder(
        reader,
        [
            d.LayerConfig(attention=part, mlp=experts if sparse else dense, norms=d.PreNorms(norm))
            for part, sparse in zip(parts, is_sparse, strict=True)
        ],
        norm,
        positions=d.longest_sequence(reader, rope, positions),
        layers_left_out=further,
        multi_token=d.MultiTokenConfig(predicting, norm, f"model.layers.{len(is_sparse)}", True) if further else None,
    )


class DeepseekV3ForCausalLM(d.DecoderForCausalLM):
    """DeepSeek V3 and R1: DeepSeek V2 with sigmoid scores and a bias for choosing; multi-token prediction drafts."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope = reader.rope()
        attention = d.read_latent_attention(reader, rope, is_neox_style=not reader.boolean("rope_interleave", True))
        experts = sigmoid_experts(reader, 256, 8, 2048, groups=8, best=4, scale=2.5)
        is_sparse = dense_first(reader, reader.count("first_k_dense_replace", 3))
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, positions=4096)


def sigmoid_experts(
    reader: d.ConfigReader, count: int, top_k: int, size: int, *, groups: int, best: int, scale: float
) -> d.MoEConfig:
    """Experts chosen by sigmoid scores with a bias; the arguments are what missing keys stand for."""
    reader.expect("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 has the method's name there
    reader.expect("topk_method", "noaux_tc")
    return d.MoEConfig(
        reader.positive("n_routed_experts", count),
        reader.positive("num_experts_per_tok", top_k),
        reader.positive("moe_intermediate_size", size),
        reader.string("hidden_act", "silu"),
        renormalize=reader.boolean("norm_topk_prob", True),
        scoring="sigmoid",
        correction_bias=True,
        groups=reader.positive("n_group", groups),
        topk_group=reader.positive("topk_group", best),
        routed_scaling_factor=reader.number("routed_scaling_factor", scale),
        shared_size=shared_size(reader, 1, size),
    )


class Dots1ForCausalLM(d.DecoderForCausalLM):
    """dots.llm1: Qwen 3's attention with DeepSeek V3's experts; later layers may have a window."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("use_sliding_window")  # max_window_layers decides
        rope = reader.rope()
        attention = d.read_attention(reader, rope, qk_norm=d.read_rms_norm(reader))
        count, window = reader.positive("num_hidden_layers"), reader.optional_positive("sliding_window", 4096)
        first = reader.integer("max_window_layers", 62)
        windows = d.layer_windows(
            reader, count, window, [window is not None and index >= first for index in range(count)]
        )
        experts = replace(
            sigmoid_experts(reader, 128, 6, 1408, groups=1, best=1, scale=1.0),
            renormalize=reader.boolean("norm_topk_prob", False),
        )
        is_sparse = dense_first(reader, reader.count("first_k_dense_replace", 0))
        parts = [replace(attention, sliding_window=size) for size in windows]
        return deepseek_decoder(reader, rope, parts, experts, is_sparse)


class SolarOpenForCausalLM(d.DecoderForCausalLM):
    """Solar Open: Llama's attention with DeepSeek V3's experts in every layer."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("use_qk_norm", False)
        reader.expect("first_k_dense_replace", 0)
        rope = reader.rope(1_000_000.0)
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=8, default_size=128),
            rope,
            qkv_bias=reader.boolean("attention_bias", False),
        )
        experts = sigmoid_experts(reader, 128, 8, 1280, groups=1, best=1, scale=1.0)
        return deepseek_decoder(reader, rope, attention, experts, dense_first(reader, 0), eps=1e-5, positions=131_072)
