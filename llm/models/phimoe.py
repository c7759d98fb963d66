"""Phi 3.5 MoE: Mixtral with LayerNorm, biases and LongRoPE, and a router that mixes two experts (arXiv:2409.12136)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm.layers.moe import SparseMixer
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    MoEConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
)
from llm.models.reading_experts import W1_W2_W3, ignore_training

_MSCALES = ("short_mscale", "long_mscale")


class PhimoeForCausalLM(DecoderForCausalLM):
    renames = (
        ("model.layers.*.mlp.router", "model.layers.*.mlp.gate"),
        ("model.layers.*.block_sparse_moe.router", "model.layers.*.mlp.gate"),
        *W1_W2_W3,
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        reader.expect("input_jitter_noise", reader.raw.get("input_jitter_noise"))
        reader.expect("num_experts_per_tok", 2)
        rope, norm = _read_rope(reader), read_layer_norm(reader, "rms_norm_eps")
        bias = reader.boolean("attention_bias", False)
        jitter = reader.number("router_jitter_noise", 0.01)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader, default_kv_heads=8),
                rope,
                reader.optional_integer("sliding_window"),
                qkv_bias=bias,
                out_bias=bias,
            ),
            mlp=MoEConfig(
                reader.positive("num_local_experts", 16),
                2,
                reader.positive("intermediate_size", 6400),
                reader.string("hidden_act", "silu"),
                routing_function=_Mixing(jitter),
            ),
            norms=PreNorms(norm),
        )
        return read_decoder(
            reader,
            layer,
            norm,
            positions=longest_sequence(reader, rope, 131072),
            lm_head_bias=reader.boolean("lm_head_bias", False),
        )


@dataclass(frozen=True)
class _Mixing:
    """Makes the router; equal to others with its jitter, in another process too."""

    jitter: float

    def __call__(self) -> SparseMixer:
        return SparseMixer(self.jitter)


def _read_rope(reader: ConfigReader) -> RopeParameters:
    """The attention factors of LongRoPE are in the file.

    Beyond the original length the long divisors hold, as in the model's own code; transformers 5 keeps the short ones.
    """
    rope = reader.rope(1e6, others=_MSCALES)
    if rope.rope_type not in ("default", "longrope"):
        raise reader.error("rope_type", rope.rope_type, "'default' or 'longrope'")
    if rope.rope_type == "default":
        return rope
    given = ConfigReader(reader.raw.get("rope_parameters", reader.raw.get("rope_scaling", {})))
    short, long = (given.positive_number(key) for key in _MSCALES)
    return replace(rope, short_mscale=short, long_mscale=long)
