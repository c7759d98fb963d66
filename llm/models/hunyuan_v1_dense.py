"""Hunyuan, dense: Llama with QK norm per head after the rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_heads, read_rms_norm
from llm.models.llama import llama_decoder


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.self_attn.query_layernorm", "model.layers.*.self_attn.q_norm"),
        ("model.layers.*.self_attn.key_layernorm", "model.layers.*.self_attn.k_norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("use_qk_norm", True)
        reader.expect("use_cla", False)
        reader.expect("eod_token_id", reader.raw.get("eod_token_id"))
        norm, heads, bias = read_rms_norm(reader, 1e-5), read_heads(reader), reader.boolean("attention_bias", False)
        rope = _rope(reader, heads.size)
        return llama_decoder(
            reader, heads, rope, norm, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_after_rope=True
        )


def _rope(reader: ConfigReader, size: int) -> RopeParameters:
    """`alpha` beside rope_type "dynamic" stretches the base, whatever the length; the other keys are then unused."""
    given = reader.raw.get("rope_parameters", reader.raw.get("rope_scaling", {}))
    alpha = given.get("alpha") if isinstance(given, dict) else None
    rope = reader.rope(others=("alpha",))
    if not alpha or rope.rope_type != "dynamic":
        return rope
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1e30:
        raise reader.error("alpha", alpha, "a positive number")
    return replace(rope, rope_type="default", theta=rope.theta * alpha ** (size / (size - 2)))
