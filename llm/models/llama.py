"""Llama 1 to 3, the models with the same config.json, and `llama_decoder` for those that differ in a few lines."""

from __future__ import annotations

from typing import Any

from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    Heads,
    LayerConfig,
    NormConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class LlamaForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        heads, norm = read_heads(reader), read_rms_norm(reader)
        return llama_decoder(reader, heads, reader.rope(), norm, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def llama_decoder(
    reader: ConfigReader,
    heads: Heads,
    rope: RopeParameters,
    norm: NormConfig,
    *,
    positions: int = 2048,
    tied: bool = False,
    mlp_bias: bool = False,
    **attention: Any,
) -> DecoderConfig:
    """One layer over and over: norms before its parts and a gated feed-forward; the last thing that a family reads.

    Args:
        positions, tied: what a missing `max_position_embeddings` and `tie_word_embeddings` mean.
        attention: further fields of `AttentionConfig`.
    """
    layer = LayerConfig(
        attention=AttentionConfig(heads, rope, **attention),
        mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"), mlp_bias),
        norms=PreNorms(norm),
    )
    return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, positions), tied=tied)
