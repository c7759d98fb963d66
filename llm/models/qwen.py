"""Qwen 1.5 to 3.5, Qwen3-Next with the gated delta rule, and Mellum 2, which is Qwen 3 with windows."""

from dataclasses import replace
from typing import ClassVar

from llm.models import decoder as d
from llm.models.text_part import TextPart, in_text_part, read_text_part


class Qwen2ForCausalLM(d.DecoderForCausalLM):
    """Qwen 2 and 2.5: biases on query, key and value; optionally sliding windows on the later layers."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        attention = d.AttentionConfig(d.read_heads(reader, default_kv_heads=32), reader.rope(), qkv_bias=True)
        windows = _later_windows(reader)
        return d.uniform_decoder(reader, d.with_windows(attention, windows), d.read_rms_norm(reader), positions=32768)


def _later_windows(reader: d.ConfigReader) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_positive("sliding_window", 4096)
    first = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and window is not None and index >= first for index in range(count)]
    return d.layer_windows(reader, count, window if use else None, sliding)


class Qwen2MoeForCausalLM(d.DecoderForCausalLM):
    """Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2 with experts, and a shared expert behind a gate of its own."""

    renames = (("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        heads, bias = d.read_heads(reader, default_kv_heads=16), reader.boolean("qkv_bias", True)
        attention = d.AttentionConfig(heads, reader.rope(), qkv_bias=bias)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 5632), reader.string("hidden_act", "silu"))
        sparse = d.read_experts(
            reader,
            count=60,
            top_k=4,
            size=1408,
            renormalize=reader.boolean("norm_topk_prob", False),
            shared_size=reader.positive("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        )
        return d.uniform_decoder(
            reader,
            d.with_windows(attention, _alternating_windows(reader)),
            d.read_rms_norm(reader),
            mlp=[sparse if is_sparse else dense for is_sparse in d.sparse_layers(reader)],
            positions=32768,
        )


def _alternating_windows(reader: d.ConfigReader) -> list[int | None]:
    """Of each layer: with `use_sliding_window` every second one before `max_window_layers` has one."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)  # 0: switched off
    first_full = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and index % 2 == 0 and index < first_full for index in range(count)]
    return d.layer_windows(reader, count, window if use else None, sliding)


_OTHERS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)


class Qwen2_5_VLForConditionalGeneration(TextPart, Qwen2ForCausalLM):
    """Qwen 2 and 2.5 VL: their language model, Qwen 2."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return read_text_part(nested(reader, _OTHERS), Qwen2ForCausalLM, {}, _OTHERS)


def nested(reader: d.ConfigReader, others: tuple[str, ...]) -> d.ConfigReader:
    """The first releases have the keys of the language model beside those of the others."""
    if "text_config" in reader.raw:
        return reader
    outside = {key: value for key, value in reader.decoded.items() if key in (*others, "vision_config")}
    text = {key: value for key, value in reader.decoded.items() if key not in outside}
    return d.ConfigReader({**outside, "model_type": reader.family, "text_config": text})


class Qwen2VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    """The same language model, behind another vision tower."""


class Qwen3ForCausalLM(d.DecoderForCausalLM):
    """Qwen 3: queries and keys are normalised per head, and there are no biases unless config.json says so."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        heads, norm = d.read_heads(reader, default_kv_heads=32, default_size=128), d.read_rms_norm(reader)
        attention = d.read_attention(reader, reader.rope(), heads, qk_norm=norm)
        return d.uniform_decoder(reader, d.with_windows(attention, _later_windows(reader)), norm, positions=32768)


class Qwen3MoeForCausalLM(d.DecoderForCausalLM):
    """Qwen 3 MoE: Qwen 3 with experts in all layers, or in those that config.json names."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader = reader.renamed({"num_local_experts": "num_experts"})
        # transformers gives every layer a window or none.
        window = reader.optional_positive("sliding_window", 4096)
        window = window if reader.boolean("use_sliding_window", False) else None
        reader.integer("max_window_layers", 0)
        heads, norm = d.read_heads(reader, default_kv_heads=4), d.read_rms_norm(reader)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 6144), reader.string("hidden_act", "silu"))
        sparse = d.read_experts(reader, 128, 8, 768, renormalize=reader.boolean("norm_topk_prob", False))
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, reader.rope(), heads, sliding_window=window, qk_norm=norm),
            norm,
            mlp=[sparse if is_sparse else dense for is_sparse in d.sparse_layers(reader)],
            positions=32768,
        )


_OTHERS_OF_QWEN3 = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3VLForConditionalGeneration(TextPart, Qwen3ForCausalLM):
    """Qwen 3 VL: its language model, Qwen 3."""

    others = _OTHERS_OF_QWEN3


class MellumForCausalLM(d.DecoderForCausalLM):
    """Mellum 2: Qwen 3 with experts, and a window with a rotary embedding of its own on some layers."""

    left_out = ("mtp",)  # a layer that predicts a second token

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader = reader.renamed({"num_local_experts": "num_experts"})
        reader.ignore("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        full, sliding = reader.rope(500_000.0, "full_attention"), reader.rope(10_000.0, "sliding_attention")
        count, window = reader.positive("num_hidden_layers"), reader.optional_positive("sliding_window", 1024)
        windows = d.layer_windows(reader, count, window, [False] * count)
        heads, norm = d.read_heads(reader, default_kv_heads=4, default_size=128), d.read_rms_norm(reader)
        attention = d.read_attention(reader, full, heads, qk_norm=norm)
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 7168), reader.string("hidden_act", "silu"))
        sparse = d.read_experts(reader, 64, 8, 896, renormalize=reader.boolean("norm_topk_prob", True))
        return d.uniform_decoder(
            reader,
            [replace(attention, rope=sliding if size else full, sliding_window=size) for size in windows],
            norm,
            mlp=[sparse if is_sparse else dense for is_sparse in d.layers_with_experts(reader, 0)],
            rope=full,
            positions=131_072,
        )


_SHARED_EXPERT_OF_MTP = (("mtp.layers.*.mlp.shared_expert", "mtp.layers.*.mlp.shared_experts.0"),)


class Qwen3NextForCausalLM(d.DecoderForCausalLM):
    """Qwen3-Next: the gated delta rule in most layers, gated attention in the others, and experts with a shared one."""

    renames = (
        ("model.layers.*.linear_attn", "model.layers.*.self_attn"),
        ("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),
        *_SHARED_EXPERT_OF_MTP,
    )

    @staticmethod
    def ignores_weight(name: str) -> bool:
        return predicts_second_token(name)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 5632), reader.string("hidden_act", "silu"))
        sparse = _experts(reader)
        return _qwen_hybrid(
            reader, "qwen_next", [sparse if is_sparse else dense for is_sparse in d.sparse_layers(reader)]
        )


def _experts(reader: d.ConfigReader, count: int = 512, best: int = 10) -> d.MoEConfig:
    """Qwen's, with a shared expert that has a gate; `count` and `best` are defaults."""
    return d.read_experts(
        reader,
        count=count,
        top_k=best,
        size=512,
        renormalize=reader.boolean("norm_topk_prob", True),
        shared_size=reader.positive("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def predicts_second_token(name: str) -> bool:
    """True for weights of the layer that does, which the model has if it drafts."""
    return name.startswith("mtp.")


def _qwen_hybrid(reader: d.ConfigReader, kind: str, mlps: list[d.PartConfig], kv_heads: int = 2) -> d.DecoderConfig:
    """A decoder with these feed-forwards, one per layer; `kind` of `GatedDeltaConfig`."""
    # config.json of a published model names the type of the state, and what transformers fixes.
    reader.expect("mamba_ssm_dtype", "float32")
    reader.expect("attn_output_gate", True)
    rope, norm = reader.rope(default_share=0.25), d.read_rms_norm(reader, kind=d.GemmaRMSNorm)
    heads = d.read_heads(reader, default_kv_heads=kv_heads, default_size=256)
    attention = d.read_attention(reader, rope, heads, qk_norm=norm, gated=True)
    reader.expect("hidden_act", "silu")
    sizes = d.DeltaHeads(
        reader.positive("linear_num_key_heads", 16),
        reader.positive("linear_num_value_heads", 32),
        reader.positive("linear_key_head_dim", 128),
        reader.positive("linear_value_head_dim", 128),
    )
    linear = d.GatedDeltaConfig(kind, sizes, reader.positive("linear_conv_kernel_dim", 4), norm.eps)
    predicting = d.LayerConfig(attention=attention, mlp=mlps[0], norms=d.PreNorms(norm))
    return d.uniform_decoder(
        reader,
        [attention if attends else linear for attends in d.attending_layers(reader, len(mlps))],
        norm,
        mlp=mlps,
        rope=rope,
        positions=32768,
        multi_token=d.MultiTokenConfig(predicting, norm, "mtp", False),
    )


class Qwen3_5ForCausalLM(d.DecoderForCausalLM):
    """Qwen 3.5, the language model by itself: Qwen3-Next's layers without experts, with other projections."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **d.DecoderForCausalLM.packed_modules_mapping,
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
    }
    renames: ClassVar[d.Renames] = (("model.layers.*.linear_attn", "model.layers.*.self_attn"),)

    @staticmethod
    def ignores_weight(name: str) -> bool:
        return predicts_second_token(name)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        _ignore_second_token(reader)
        reader.expect("mlp_only_layers", [])
        mlp: d.PartConfig = d.GatedMLPConfig(
            reader.positive("intermediate_size", 12288), reader.string("hidden_act", "silu")
        )
        return _qwen_hybrid(reader, "qwen", [mlp] * reader.positive("num_hidden_layers"), 4)


def _ignore_second_token(reader: d.ConfigReader) -> None:
    """Keys of the layer that predicts a second token."""
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        reader.expect(key, reader.raw.get(key))


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen 3.5 with experts, the language model by itself."""

    renames: ClassVar[d.Renames] = (
        *Qwen3_5ForCausalLM.renames,
        ("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),
        *_SHARED_EXPERT_OF_MTP,
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        _ignore_second_token(reader)
        reader.expect("mlp_only_layers", [])
        mlp: d.PartConfig = _experts(reader, 256, 8)
        return _qwen_hybrid(reader, "qwen", [mlp] * reader.positive("num_hidden_layers"))


_IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3_5ForConditionalGeneration(TextPart, Qwen3_5ForCausalLM):
    """Qwen 3.5: its language model."""

    renames = (*in_text_part(Qwen3_5ForCausalLM.renames), *TextPart.renames)
    others = _IMAGES


class Qwen3_5MoeForConditionalGeneration(TextPart, Qwen3_5MoeForCausalLM):
    """Qwen 3.5 with experts: its language model."""

    renames = (
        *_SHARED_EXPERT_OF_MTP,
        *in_text_part(Qwen3_5MoeForCausalLM.renames),
        *TextPart.renames,
    )
    others = _IMAGES
