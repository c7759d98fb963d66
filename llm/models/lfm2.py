"""LFM2: short convolutions, and attention in some layers; queries and keys are normalised per head."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    NormConfig,
    PartConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
)
from llm.models.decoder.recurrent import ShortConvConfig

_LAYER = "model.layers.*"
# The checkpoints of transformers 4 have keys that its code never read.
_NEVER_READ = """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc""".split()


class Lfm2ForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (f"{_LAYER}.conv", f"{_LAYER}.self_attn"),
        (f"{_LAYER}.self_attn.out_proj", f"{_LAYER}.self_attn.o_proj"),
        (f"{_LAYER}.self_attn.q_layernorm", f"{_LAYER}.self_attn.q_norm"),
        (f"{_LAYER}.self_attn.k_layernorm", f"{_LAYER}.self_attn.k_norm"),
        (f"{_LAYER}.operator_norm", f"{_LAYER}.input_layernorm"),
        (f"{_LAYER}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
        (f"{_LAYER}.feed_forward.w1", f"{_LAYER}.mlp.gate_proj"),
        (f"{_LAYER}.feed_forward.w2", f"{_LAYER}.mlp.down_proj"),
        (f"{_LAYER}.feed_forward.w3", f"{_LAYER}.mlp.up_proj"),
        ("model.embedding_norm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        return lfm2_decoder(
            reader, [GatedMLPConfig(_inner_size(reader), "silu")] * reader.positive("num_hidden_layers")
        )


def lfm2_decoder(reader: ConfigReader, mlps: list[PartConfig]) -> DecoderConfig:
    """A decoder with these feed-forwards, one per layer."""
    for key in _NEVER_READ:
        reader.expect(key, reader.raw.get(key))
    rope, norm = reader.rope(1e6), NormConfig(reader.positive_number("norm_eps", 1e-5))
    attention = AttentionConfig(read_heads(reader, default_kv_heads=8), rope, qk_norm=norm)
    bias = reader.boolean("conv_bias", False)
    conv = ShortConvConfig(reader.positive("hidden_size"), reader.positive("conv_L_cache", 3), bias)
    layers = [
        LayerConfig(attention=conv if is_conv else attention, mlp=mlp, norms=PreNorms(norm))
        for is_conv, mlp in zip(_convolutions(reader, len(mlps)), mlps, strict=True)
    ]
    tied = reader.boolean("tie_embedding", True)
    return read_decoder(reader, layers, norm, positions=longest_sequence(reader, rope, 128_000), tied=tied)


def _convolutions(reader: ConfigReader, count: int) -> list[bool]:
    """Which layers are convolutions: by `layer_types`, or all but those of `full_attn_idxs`."""
    attention = reader.integers("full_attn_idxs")
    kinds = reader.names("layer_types")
    if kinds is None:
        attending = range(count) if attention is None else attention
        return [index not in attending for index in range(count)]
    if len(kinds) != count or set(kinds) - {"full_attention", "conv"}:
        raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'conv'")
    return [kind == "conv" for kind in kinds]


def _inner_size(reader: ConfigReader) -> int:
    """Channels of the feed-forward: two thirds of the number in the file, rounded up, unless it says otherwise."""
    size = reader.positive("block_ff_dim", reader.positive("intermediate_size", 12288))
    multiple = reader.positive("block_multiple_of", 256)
    factor = reader.positive_number("block_ffn_dim_multiplier", 1.0)
    if not reader.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(factor * int(2 * size / 3))
    return multiple * -(-size // multiple)
