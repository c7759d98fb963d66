"""HyperCLOVA X: Granite with a norm behind each part too, and logits that are multiplied, not divided."""

from __future__ import annotations

from collections.abc import Mapping

from llm.models import decoder as d

_LAYER = "model.layers.*"


class HyperCLOVAXForCausalLM(d.DecoderForCausalLM):
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
        rope, norm, heads = reader.rope(), d.read_rms_norm(reader), d.read_heads(reader)
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        scale = reader.optional_number("attention_multiplier")
        mlp = d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"), mlp_bias)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, scale=scale),
            mlp=mlp,
            norms=d.PreAndPostNorms(norm),
        )
        return d.read_decoder(
            reader,
            layer,
            norm,
            positions=d.longest_sequence(reader, rope),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=1 / reader.positive_number("logits_scaling", 1.0),
        )
