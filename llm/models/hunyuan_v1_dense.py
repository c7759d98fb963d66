"""Hunyuan, dense: Llama with QK norm per head after the rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_heads, read_rms_norm
from llm.models.llama import llama_decoder

_UNUSED = (
    "cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id im_start_id mask_init_id "
    "num_media_embeds org_vocab_size pad_id pool_type text_end_id text_start_id"
).split()


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.self_attn.query_layernorm", "model.layers.*.self_attn.q_norm"),
        ("model.layers.*.self_attn.key_layernorm", "model.layers.*.self_attn.k_norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        expect_older_keys(reader)
        reader.expect("num_experts", 1)
        norm, heads, bias = read_rms_norm(reader, 1e-5), read_heads(reader), reader.boolean("attention_bias", False)
        rope = read_rope(reader, heads.size)
        return llama_decoder(
            reader, heads, rope, norm, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_after_rope=True
        )


def expect_older_keys(reader: ConfigReader) -> None:
    """Of the published files, at the values that change nothing; the rest is about other models of the same code."""
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        reader.expect(key, True)
    for key in ("use_cla", "position_embedding_xdrope", "add_classification_head", "mlp_bias"):
        reader.expect(key, False)
    reader.expect("norm_type", "rms")
    reader.expect("attention_head_dim", reader.raw.get("head_dim"))
    for key in _UNUSED:
        reader.expect(key, reader.raw.get(key))


def read_rope(reader: ConfigReader, size: int) -> RopeParameters:
    """`alpha` beside rope_type "dynamic" stretches the base, whatever the length; the other keys are then unused."""
    given = reader.raw.get("rope_parameters", reader.raw.get("rope_scaling", {}))
    alpha = given.get("alpha") if isinstance(given, dict) else None
    rope = reader.rope(others=("alpha",))
    if not alpha or rope.rope_type != "dynamic":
        return rope
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1e30:
        raise reader.error("alpha", alpha, "a positive number")
    return replace(rope, rope_type="default", theta=rope.theta * alpha ** (size / (size - 2)))
