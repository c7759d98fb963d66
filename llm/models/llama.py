"""Llama 1 to 3, and models that differ from them in a few lines.

Mistral, Mixtral, Ministral, Arcee, Helium, Seed-OSS, SmolLM3, Apertus, InternLM, Nemotron, Jais 2, StableLM,
StarCoder 2, HyperCLOVA X, NanoChat, ERNIE 4.5.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from llm.models import decoder as d
from llm.models.text_part import TextPart, read_text_part


class LlamaForCausalLM(d.DecoderForCausalLM):
    """Llama 1 to 3, and the models with the same config.json."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        return d.uniform_decoder(reader, d.read_attention(reader, reader.rope()), d.read_rms_norm(reader), mlp=mlp)


class ArceeForCausalLM(d.DecoderForCausalLM):
    """Arcee's AFM: Llama with an MLP without a gate, and relu squared."""

    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        mlp = d.read_plain_mlp(reader, "relu2", bias=reader.boolean("mlp_bias", False))
        attention, norm = d.read_attention(reader, reader.rope()), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=4096)


class HeliumForCausalLM(d.DecoderForCausalLM):
    """Helium: Llama with an interleaved rotary embedding."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=20, default_size=128),
            reader.rope(100_000.0),
            rope_interleaved=True,
            qkv_bias=reader.boolean("attention_bias", False),
        )
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader, 1e-8), mlp=mlp, positions=4096)


class SeedOssForCausalLM(d.DecoderForCausalLM):
    """Seed-OSS: Llama with a QKV bias."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("residual_dropout", reader.raw.get("residual_dropout"))
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=8, default_size=128),
            reader.rope(),
            qkv_bias=reader.boolean("attention_bias", True),
            out_bias=reader.boolean("attention_out_bias", False),
        )
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader), mlp=mlp, positions=524288)


class SmolLM3ForCausalLM(d.DecoderForCausalLM):
    """SmolLM3: Llama in which some layers, every fourth by default, have no rope."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        count = reader.positive("num_hidden_layers")
        interval = reader.positive("no_rope_layer_interval", 4)
        has_rope = reader.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        rope, heads = reader.rope(2_000_000.0), d.read_heads(reader, default_kv_heads=4)
        attention = d.with_windows(d.read_attention(reader, rope, heads), _windows(reader, count, has_rope))
        return d.uniform_decoder(
            reader,
            [part if rotates else replace(part, rope=None) for part, rotates in zip(attention, has_rope, strict=True)],
            d.read_rms_norm(reader),
            mlp=d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False)),
            rope=rope,
            positions=32768,
            tied=True,
        )


def _windows(reader: d.ConfigReader, count: int, has_rope: list[int]) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers without rope have one."""
    window = reader.optional_positive("sliding_window")
    use = reader.boolean("use_sliding_window", False)
    reader.integer("max_window_layers", count)  # transformers does not read it either
    sliding = [use and window is not None and not rotates for rotates in has_rope]
    return d.layer_windows(reader, count, window if use else None, sliding)


_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


class ApertusForCausalLM(d.DecoderForCausalLM):
    """Apertus: Llama with norms of queries and keys, and an MLP without a gate whose activation is trained (xIELU)."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.attention_layernorm", "model.layers.*.input_layernorm"),
        ("model.layers.*.feedforward_layernorm", "model.layers.*.post_attention_layernorm"),
    )
    # Where the exponential is cut off for its gradient, which no answer shows.
    ignored_weights = (*d.DecoderForCausalLM.ignored_weights, "act_fn.eps")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("qk_norm", True)
        reader.expect("post_norm", False)
        reader.expect("mlp_bias", False)
        rope, norm = reader.rope(12_000_000.0, default_scaling=_ROPE), d.read_rms_norm(reader, 1e-5)
        mlp = d.PlainMLPConfig(reader.positive("intermediate_size", 14336), reader.string("hidden_act", "xielu"))
        return d.uniform_decoder(reader, d.read_attention(reader, rope, qk_norm=norm), norm, mlp=mlp, positions=65536)


_INTERNLM_LAYER = (
    ("attention.wqkv", "self_attn.qkv_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
)


class InternLM2ForCausalLM(d.DecoderForCausalLM):
    """InternLM 2 and 2.5: Llama with names of its own and one tensor of queries, keys and values."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"gate_up_proj": ["gate_proj", "up_proj"]}
    renames = (
        *((f"model.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _INTERNLM_LAYER),
        ("model.tok_embeddings", "model.embed_tokens"),
        ("output", "lm_head"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("attn_implementation")
        bias = reader.boolean("bias", True)
        attention = d.AttentionConfig(
            d.read_heads(reader), reader.rope(), qkv_bias=bias, out_bias=bias, qkv_by_key_head=True
        )
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader))


class InternLM3ForCausalLM(d.DecoderForCausalLM):
    """InternLM 3: Llama with other names for its biases."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # The published files say qkv_bias and bias; one without the other is refused by transformers too.
        bias = reader.boolean("attention_bias", reader.boolean("qkv_bias", False))
        reader.expect("mlp_bias", bias)
        reader.expect("bias", bias)
        heads = d.read_heads(reader, default_kv_heads=2, default_size=128)
        attention = d.AttentionConfig(heads, reader.rope(), qkv_bias=bias, out_bias=bias)
        mlp, norm = d.read_gated_mlp(reader, bias=bias), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=32768)


class NemotronForCausalLM(d.DecoderForCausalLM):
    """Nemotron 3 and 4, Minitron: LayerNorm with weight + 1, partial rotary embedding, an ungated relu squared MLP."""

    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        mlp = d.read_plain_mlp(reader, "relu2", bias=reader.boolean("mlp_bias", False))
        attention = d.read_attention(reader, reader.rope(default_share=0.5))
        norm = d.read_layer_norm(reader, "norm_eps", d.LayerNorm1P)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=4096)


class Jais2ForCausalLM(d.DecoderForCausalLM):
    """Jais 2: Llama with layer norms and a plain feed-forward of squared ReLU."""

    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        bias = reader.boolean("attention_bias", True)
        mlp = d.read_plain_mlp(reader, "relu2", bias=reader.boolean("mlp_bias", True))
        attention = d.AttentionConfig(d.read_heads(reader), reader.rope(), qkv_bias=bias, out_bias=bias)
        return d.uniform_decoder(reader, attention, d.read_layer_norm(reader), mlp=mlp, positions=8192)


class StableLmForCausalLM(d.DecoderForCausalLM):
    """StableLM 3B and 2: Llama with LayerNorm and partial rotary embedding; some have a parallel residual."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("qk_layernorm", False)  # stablelm-2-12b alone: a norm for each head
        rope, norm = reader.rope(default_share=0.25), d.read_layer_norm(reader)
        norms = d.ParallelNorms(norm) if reader.boolean("use_parallel_residual", False) else None
        attention = d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=reader.boolean("use_qkv_bias", False))
        return d.uniform_decoder(reader, attention, norm, norms=norms, positions=4096)


class Starcoder2ForCausalLM(d.DecoderForCausalLM):
    """StarCoder 2: rotary embedding, LayerNorm, biases, an MLP without a gate; some checkpoints have a window."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.mlp.c_fc", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.c_proj", "model.layers.*.mlp.down_proj"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        _expect_older_keys(reader)
        bias = reader.boolean("use_bias", True)
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=2),
            reader.rope(),
            reader.optional_positive("sliding_window"),
            qkv_bias=bias,
            out_bias=bias,
        )
        mlp, norm = d.read_plain_mlp(reader, "gelu_pytorch_tanh", bias=bias), d.read_layer_norm(reader, "norm_epsilon")
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=4096, tied=True)


def _expect_older_keys(reader: d.ConfigReader) -> None:
    """What the published files carry and transformers does not read; softmax is float32 here anyway."""
    reader.expect("norm_type", "layer_norm")
    reader.expect("mlp_type", "default")
    reader.expect("scale_attn_weights", True)
    for key in ("layer_norm_epsilon", "activation_function", "residual_dropout", "embedding_dropout"):
        reader.expect(key, reader.raw.get(key))
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        reader.boolean(key, True)


_LAYER = "model.layers.*"


class HyperCLOVAXForCausalLM(d.DecoderForCausalLM):
    """HyperCLOVA X: Granite with a norm behind each part too, and logits that are multiplied, not divided."""

    renames = (
        (f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.pre_feedforward_layernorm"),
        (f"{_LAYER}.post_norm1", f"{_LAYER}.post_attention_layernorm"),
        (f"{_LAYER}.post_norm2", f"{_LAYER}.post_feedforward_layernorm"),
    )

    @classmethod
    def declines(cls, config: Mapping[str, object]) -> str | None:
        """Why transformers' code computes this model by default; None: this class does."""
        for key, usual in (("use_post_norm", True), ("residual_multiplier", 1.0)):
            if config.get(key, usual) != usual:
                return f"{key} is not {usual}"
        return None

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("use_post_norm", True)
        reader.expect("residual_multiplier", 1.0)
        norm = d.read_rms_norm(reader)
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, reader.rope(), scale=reader.optional_number("attention_multiplier")),
            norm,
            mlp=d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False)),
            norms=d.PreAndPostNorms(norm),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=1 / reader.positive_number("logits_scaling", 1.0),
        )


class NanoChatForCausalLM(d.DecoderForCausalLM):
    """NanoChat: RMS norms without weights, also of the embedding, a rotation the other way round, and relu squared."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.mlp.fc1", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.fc2", "model.layers.*.mlp.down_proj"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = replace(reader.rope(), reverse=True), replace(d.read_rms_norm(reader), has_weight=False)
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, rope, qk_norm=norm, qk_norm_after_rope=True),
            norm,
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size", 8192), reader.string("hidden_act", "relu2")),
            embedding_norm=norm,
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 15.0),
        )


class Ernie4_5ForCausalLM(d.DecoderForCausalLM):
    """ERNIE 4.5, dense: Llama with an interleaved rotary embedding."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        bias = reader.boolean("use_bias", False)
        heads = d.read_heads(reader, default_kv_heads=2, default_size=128)
        attention = d.AttentionConfig(
            heads, reader.rope(500_000.0), rope_interleaved=True, qkv_bias=bias, out_bias=bias
        )
        mlp, norm = d.read_gated_mlp(reader, bias=bias), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=131072, tied=True)


class Ernie4_5_MoeForCausalLM(d.DecoderForCausalLM):
    """ERNIE 4.5 with experts: a bias for choosing them, and some that every token has."""

    renames = (("model.layers.*.mlp.moe_statics", "model.layers.*.mlp.gate"),)
    # The layers that predict a second token.
    left_out = ("model.mtp_block", "model.mtp_emb_norm", "model.mtp_hidden_norm", "model.mtp_linear_proj")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        for key in ("moe_capacity", "num_nextn_predict_layers"):
            reader.expect(key, reader.raw.get(key))
        reader.expect("moe_gate", "topk")
        reader.expect("moe_norm_min", 1e-12)
        reader.expect("use_bias", False)
        reader.expect("use_rmsnorm", True)
        activation, inner = reader.string("hidden_act", "silu"), reader.positive("moe_intermediate_size", 1536)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 12288), activation)
        shared = reader.count("moe_num_shared_experts", 2)
        sparse = d.MoEConfig(
            reader.positive("moe_num_experts", 64),
            reader.positive("moe_k", 6),
            inner,
            activation,
            correction_bias=reader.boolean("moe_use_aux_free", True),
            shared_size=inner * shared if shared > 0 else None,
        )
        heads = d.read_heads(reader, default_kv_heads=4)
        return d.uniform_decoder(
            reader,
            d.AttentionConfig(heads, reader.rope(500_000.0), rope_interleaved=True),
            d.read_rms_norm(reader, 1e-5),
            mlp=[sparse if is_sparse else dense for is_sparse in _sparse_layers(reader)],
            positions=131072,
            tied=True,
        )


def _sparse_layers(reader: d.ConfigReader) -> list[bool]:
    """Every `moe_layer_interval`-th of those between two indices; the last of them may be -1 for the last layer."""
    count = reader.positive("num_hidden_layers")
    interval = reader.positive("moe_layer_interval", 1)
    first, last = reader.count("moe_layer_start_index", 1), reader.integer("moe_layer_end_index", -1)
    last = count - 1 if last == -1 else last
    return [(index + 1) % interval == 0 and first <= index <= last for index in range(count)]


class MistralForCausalLM(d.DecoderForCausalLM):
    """Mistral 7B and its successors: Llama, some with a sliding window on every layer."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        heads, window = d.read_heads(reader, default_kv_heads=8), reader.optional_positive("sliding_window", 4096)
        attention = d.AttentionConfig(heads, reader.rope(), window)
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader), positions=131072)


class MinistralForCausalLM(d.DecoderForCausalLM):
    """Ministral 8B: Mistral with a window on some layers only."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        count, window = reader.positive("num_hidden_layers"), reader.optional_positive("sliding_window", 4096)
        windows = d.layer_windows(reader, count, window, [window is not None] * count)
        attention = d.AttentionConfig(d.read_heads(reader, default_kv_heads=8), reader.rope())
        return d.uniform_decoder(reader, d.with_windows(attention, windows), d.read_rms_norm(reader), positions=131072)


class Ministral3ForCausalLM(d.DecoderForCausalLM):
    """Ministral 3: Llama with YaRN and queries scaled by position beyond the original context."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope = reader.rope(others=("llama_4_scaling_beta", "max_position_embeddings"))
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=8, default_size=128),
            rope,
            reader.optional_positive("sliding_window"),
            query_scale=d.QueryScale(_beta(reader), rope.original_max_position_embeddings),
        )
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader, 1e-5), positions=262144)


def _beta(reader: d.ConfigReader) -> float:
    given = reader.raw.get("rope_parameters", {})
    return d.ConfigReader(given if isinstance(given, dict) else {}).number("llama_4_scaling_beta")


class MixtralForCausalLM(d.DecoderForCausalLM):
    """Mixtral: Mistral with experts in the place of the feed-forward."""

    renames = d.W1_W2_W3

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        heads, window = d.read_heads(reader, default_kv_heads=8), reader.optional_positive("sliding_window")
        mlp = d.read_experts(reader, 8, 2, count_key="num_local_experts", size_key="intermediate_size")
        attention, norm = d.AttentionConfig(heads, reader.rope(1e6), window), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=131_072)


_FAMILIES: dict[str, type[d.DecoderForCausalLM]] = {"mistral": MistralForCausalLM, "ministral3": Ministral3ForCausalLM}
_DEFAULTS: dict[str, object] = {"model_type": "mistral", "sliding_window": None}
_OTHERS = (
    "image_token_index",
    "image_token_id",
    "projector_hidden_act",
    "vision_feature_layer",
    "multimodal_projector_bias",
    "spatial_merge_size",
)


class Mistral3ForConditionalGeneration(TextPart, MistralForCausalLM):
    """Mistral Small 3.1 and later, Ministral 3: their language model, which is Mistral or Ministral 3."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        kind = str(reader.nested("text_config").get("model_type", "mistral"))
        if kind not in _FAMILIES:
            raise reader.error("model_type of text_config", kind, " or ".join(map(repr, _FAMILIES)))
        return read_text_part(reader, _FAMILIES[kind], _DEFAULTS, _OTHERS)
