"""Qwen3-Next and Qwen 3.5: the gated delta rule in most layers, gated attention in the others."""

from typing import ClassVar

from llm.models import decoder as d
from llm.models.text_part import TextPart, in_text_part

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
