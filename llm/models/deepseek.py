"""DeepSeek V2, V3 and R1, and families with their experts or their latent attention: MiniCPM3, Kimi Linear, ..."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

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
        experts = d.read_experts(
            reader,
            count=64,
            top_k=reader.positive("num_experts_per_tok"),
            size=1407,
            count_key="n_routed_experts",
            renormalize=False,
            groups=groups if method == "group_limited_greedy" else 1,
            topk_group=best if method == "group_limited_greedy" else 1,
            routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
            shared_size=shared_size(reader, 2, 1407),
        )
        first = reader.count("first_k_dense_replace", 0)
        is_latent = reader.boolean("use_mla", True)  # not in DeepSeek-OCR
        attention = (d.read_latent_attention if is_latent else d.read_attention)(reader, rope)
        return deepseek_decoder(reader, rope, attention, experts, dense_first(reader, first))


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
    for key in ("aux_loss_alpha", "seq_aux", "ep_size"):  # of training
        reader.expect(key, reader.raw.get(key))
    reader.expect("moe_layer_freq", 1)
    reader.expect("mlp_bias", False)
    further = reader.count("num_nextn_predict_layers", 0)
    if not 0 <= further <= _MOST_FURTHER_LAYERS:
        raise reader.error("num_nextn_predict_layers", further, f"an integer from 0 to {_MOST_FURTHER_LAYERS}")
    norm = d.read_rms_norm(reader, eps)
    reader.ignore("intermediate_size")  # where all layers have experts it is not needed, nor always there
    dense = experts if all(is_sparse) else d.read_gated_mlp(reader)
    last = attention if isinstance(attention, d.PartConfig) else attention[-1]
    predicting = d.LayerConfig(attention=last, mlp=experts, norms=d.PreNorms(norm))
    return d.uniform_decoder(
        reader,
        attention,
        norm,
        mlp=[experts if sparse else dense for sparse in is_sparse],
        rope=rope,
        positions=positions,
        layers_left_out=further,
        multi_token=d.MultiTokenConfig(predicting, norm, f"model.layers.{len(is_sparse)}", True) if further else None,
    )


class DeepseekV3ForCausalLM(d.DecoderForCausalLM):
    """DeepSeek V3 and R1: DeepSeek V2 with sigmoid scores and a bias for choosing; multi-token prediction drafts."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope = reader.rope()
        attention = latent_of_v3(reader, rope)
        experts = sigmoid_experts(reader, 256, 8, 2048, groups=8, best=4, scale=2.5)
        is_sparse = dense_first(reader, reader.count("first_k_dense_replace", 3))
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, positions=4096)


def latent_of_v3(reader: d.ConfigReader, rope: d.RopeParameters, **more: int) -> d.LatentAttentionConfig:
    """Latent attention whose `rope_interleave` says how channels are paired; `more`: what missing keys stand for."""
    is_neox_style = not reader.boolean("rope_interleave", True)
    return d.read_latent_attention(reader, rope, is_neox_style=is_neox_style, **more)


def sigmoid_experts(
    reader: d.ConfigReader, count: int, top_k: int, size: int, *, groups: int, best: int, scale: float
) -> d.MoEConfig:
    """Experts chosen by sigmoid scores with a bias; the arguments are what missing keys stand for."""
    reader.expect("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 has the method's name there
    reader.expect("topk_method", "noaux_tc")
    return d.read_experts(
        reader,
        count=count,
        top_k=top_k,
        size=size,
        count_key="n_routed_experts",
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


class MiniCPM3ForCausalLM(d.DecoderForCausalLM):
    """MiniCPM3: latent attention, with constants on the embedding, each part's output and the logits."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        hidden, count = reader.positive("hidden_size"), reader.positive("num_hidden_layers")
        attention = d.read_latent_attention(
            reader,
            rope,
            q_lora_rank=768,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=hidden // reader.positive("num_attention_heads"),
            is_neox_style=True,
        )
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        # null says that a constant is 1.
        depth = reader.optional_number("scale_depth", 1.4)
        base = reader.optional_number("dim_model_base", 256)
        if base is not None and base <= 0:
            raise reader.error("dim_model_base", base, "a positive number or null")
        layer = d.LayerConfig(
            attention=attention,
            mlp=mlp,
            norms=d.ScaledPreNorms(norm, 1.0 if depth is None else depth / count**0.5),
        )
        return d.read_decoder(
            reader,
            [layer] * count,
            norm,
            positions=d.longest_sequence(reader, rope, 32_768),
            tied=True,
            embedding_multiplier=reader.number("scale_emb", 12.0),
            logits_divisor=1.0 if base is None else hidden / base,
        )


class YoutuForCausalLM(d.DecoderForCausalLM):
    """Youtu-LLM: DeepSeek V3's latent attention in a dense decoder."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("embedding_initializer_range")
        attention = latent_of_v3(reader, reader.rope())
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader), positions=131_072, tied=True)


# Names of keys in published files -> DeepSeek V3's.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_router_activation_func": "scoring_func",
}
# Of heads that latents have not, and of rope, which there is none of.
_UNUSED = "num_key_value_heads head_dim qk_head_dim rope_theta rope_scaling rope_parameters use_grouped_topk".split()


class KimiLinearForCausalLM(d.DecoderForCausalLM):
    """Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in others, and experts."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **d.DecoderForCausalLM.packed_modules_mapping,
        "conv1d": ["q_conv1d", "k_conv1d", "v_conv1d"],
    }
    renames = d.W1_W2_W3

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader = reader.renamed(_NAMES)
        reader.ignore(*_UNUSED)
        for key, value in {"mla_use_nope": True, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}.items():
            reader.expect(key, value)
        norm, count = d.read_rms_norm(reader, 1e-5), reader.positive("num_hidden_layers")
        nested = reader.nested("linear_attn_config")
        attention, linear = _latent(reader), _delta(reader, nested, norm.eps)
        attended = nested.get("full_attn_layers")  # the first layer is 1
        default = [index + 1 in attended if isinstance(attended, list) else index % 4 == 3 for index in range(count)]
        mlps = {
            "dense": d.GatedMLPConfig(reader.positive("intermediate_size", 9216), reader.string("hidden_act", "silu")),
            "sparse": sigmoid_experts(reader, 256, 8, 1024, groups=1, best=1, scale=2.446),
        }
        first = reader.count("first_k_dense_replace", 1)
        kinds = reader.names("mlp_layer_types") or ["dense" if index < first else "sparse" for index in range(count)]
        if len(kinds) != count or not mlps.keys() >= set(kinds):
            raise reader.error("mlp_layer_types", kinds, f"{count} of 'dense' or 'sparse'")
        attends = d.attending_layers(reader, count, default)
        return d.uniform_decoder(
            reader,
            [attention if attending else linear for attending in attends],
            norm,
            mlp=[mlps[kind] for kind in kinds],
            positions=1_048_576,
        )


def _latent(reader: d.ConfigReader) -> d.LatentAttentionConfig:
    sizes = (("kv_lora_rank", 512), ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128))
    latent, plain, shared, value = (reader.positive(*size) for size in sizes)
    heads, rank = reader.positive("num_attention_heads", 32), reader.optional_positive("q_lora_rank")
    bias = reader.boolean("attention_bias", False)
    return d.LatentAttentionConfig(heads, rank, latent, plain, shared, value, None, bias)


def _delta(reader: d.ConfigReader, nested: Mapping[str, object], eps: float) -> d.GatedDeltaConfig:
    """From `linear_attn_config` of published files, or from transformers' keys."""
    inner = d.ConfigReader({key: value for key, value in nested.items() if isinstance(value, int)})
    heads = inner.positive("num_heads", reader.positive("linear_num_heads", 32))
    size = inner.positive("head_dim", reader.positive("linear_head_dim", 128))
    kernel = inner.positive("short_conv_kernel_size", reader.positive("linear_conv_kernel_dim", 4))
    return d.GatedDeltaConfig("kimi", d.DeltaHeads(heads, heads, size, size), kernel, eps, activation="sigmoid")
