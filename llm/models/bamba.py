"""Bamba: Llama with Mamba 2 in the place of most attention."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_mamba2,
    read_rms_norm,
)


class BambaForCausalLM(DecoderForCausalLM):
    renames = (
        ("model.layers.*.feed_forward", "model.layers.*.mlp"),
        ("model.layers.*.pre_ff_layernorm", "model.layers.*.post_attention_layernorm"),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore("num_logits_to_keep", "z_loss_coefficient")  # of transformers' own forward and of training
        rope, norm = reader.rope(default_share=0.5), read_rms_norm(reader, 1e-5)
        bias, heads = reader.boolean("attention_bias", False), read_heads(reader, default_kv_heads=8)
        reader.expect("attn_rotary_emb", int(heads.size * rope.partial_rotary_factor))
        attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias)
        mamba = read_mamba2(reader, norm.eps)
        mlp = GatedMLPConfig(
            reader.positive("intermediate_size", 14336),
            reader.string("hidden_act", "silu"),
            reader.boolean("mlp_bias", False),
        )
        attends = set(reader.integers("attn_layer_indices") or ())
        return read_decoder(
            reader,
            [
                LayerConfig(attention=attention if index in attends else mamba, mlp=mlp, norms=PreNorms(norm))
                for index in range(reader.positive("num_hidden_layers"))
            ],
            norm,
            positions=longest_sequence(reader, rope, 262_144),
        )
