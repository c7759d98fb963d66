"""Falcon-H1: attention and Mamba 2 side by side in every layer, and constants on everything."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    longest_sequence,
    read_decoder,
    read_heads,
    read_mamba2,
    read_rms_norm,
)
from llm.models.decoder.side_by_side import ScaledSums, SideBySide
from llm.models.mamba import TRAINING


class FalconH1ForCausalLM(DecoderForCausalLM):
    renames = (
        ("model.layers.*.feed_forward", "model.layers.*.mlp"),
        ("model.layers.*.pre_ff_layernorm", "model.layers.*.post_attention_layernorm"),
        ("model.final_layernorm", "model.norm"),
    )
    # The constants of config.json, as a tensor.
    ignored_weights = (*DecoderForCausalLM.ignored_weights, "mamba.mup_vector")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore(*TRAINING, "num_logits_to_keep", "mlp_expansion_factor", "attn_layer_indices")
        reader.expect("mamba_use_mlp", True)
        rope, norm = reader.rope(), read_rms_norm(reader, 1e-5)
        heads, bias = read_heads(reader, default_kv_heads=8), reader.boolean("attention_bias", False)
        key = reader.number("key_multiplier", 1.0)
        attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, scale=heads.size**-0.5 * key)
        mamba = read_mamba2(
            reader,
            norm.eps if reader.boolean("mamba_rms_norm", False) else None,
            width=reader.optional_integer("mamba_d_ssm", 1024),
            norm_before_gate=reader.boolean("mamba_norm_before_gate", True),
            multipliers=reader.numbers("ssm_multipliers", (1.0,) * 5),
        )
        reader.expect("projectors_bias", mamba.bias)
        size, activation = reader.positive("intermediate_size", 14336), reader.string("hidden_act", "silu")
        gate, down = reader.numbers("mlp_multipliers", (1.0, 1.0))
        mlp = GatedMLPConfig(size, activation, reader.boolean("mlp_bias", False), gate, down)
        norms = ScaledSums(
            norm,
            mamba=(reader.number("ssm_in_multiplier", 1.0), reader.number("ssm_out_multiplier", 1.0)),
            attention=(reader.number("attention_in_multiplier", 1.0), reader.number("attention_out_multiplier", 1.0)),
        )
        return read_decoder(
            reader,
            SideBySide(attention=attention, mamba=mamba, mlp=mlp, norms=norms),
            norm,
            positions=longest_sequence(reader, rope, 8192),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=1.0 / reader.positive_number("lm_head_multiplier", 1.0),
        )
