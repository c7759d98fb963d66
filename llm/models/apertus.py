"""Apertus: Llama with norms of queries and keys, and an MLP without a gate whose activation is trained (xIELU)."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    PlainMLPConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)

_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


class ApertusForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.attention_layernorm", "model.layers.*.input_layernorm"),
        ("model.layers.*.feedforward_layernorm", "model.layers.*.post_attention_layernorm"),
    )
    # Where the exponential is cut off for its gradient, which no answer shows.
    ignored_weights: ClassVar[tuple[str, ...]] = (*DecoderForCausalLM.ignored_weights, "act_fn.eps")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("qk_norm", True)
        reader.expect("post_norm", False)
        reader.expect("mlp_bias", False)
        rope, norm = reader.rope(12_000_000.0, default_scaling=_ROPE), read_rms_norm(reader, 1e-5)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm),
            mlp=PlainMLPConfig(reader.positive("intermediate_size", 14336), reader.string("hidden_act", "xielu")),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 65536))
