"""ERNIE 4.5 with experts: an interleaved rotary embedding, a bias for choosing experts, and experts every token has."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    MoEConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.reading_experts import ignore_training


class Ernie4_5_MoeForCausalLM(DecoderForCausalLM):
    renames = (("model.layers.*.mlp.moe_statics", "model.layers.*.mlp.gate"),)
    # The layers that predict a second token.
    left_out = ("model.mtp_block", "model.mtp_emb_norm", "model.mtp_hidden_norm", "model.mtp_linear_proj")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        for key in ("moe_capacity", "num_nextn_predict_layers"):
            reader.expect(key, reader.raw.get(key))
        reader.expect("moe_gate", "topk")
        reader.expect("moe_norm_min", 1e-12)
        reader.expect("use_bias", False)
        reader.expect("use_rmsnorm", True)
        rope, norm, heads = reader.rope(500_000.0), read_rms_norm(reader, 1e-5), read_heads(reader, default_kv_heads=4)
        activation, inner = reader.string("hidden_act", "silu"), reader.positive("moe_intermediate_size", 1536)
        dense = GatedMLPConfig(reader.positive("intermediate_size", 12288), activation)
        shared = reader.integer("moe_num_shared_experts", 2)
        sparse = MoEConfig(
            reader.positive("moe_num_experts", 64),
            reader.positive("moe_k", 6),
            inner,
            activation,
            correction_bias=reader.boolean("moe_use_aux_free", True),
            shared_size=inner * shared if shared > 0 else None,
        )

        def layer(is_sparse: bool) -> LayerConfig:
            attention = AttentionConfig(heads, rope, rope_interleaved=True)
            return LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=PreNorms(norm))

        return read_decoder(
            reader,
            map(layer, _sparse_layers(reader)),
            norm,
            positions=longest_sequence(reader, rope, 131072),
            tied=True,
        )


def _sparse_layers(reader: ConfigReader) -> list[bool]:
    """Every `moe_layer_interval`-th of those between two indices; the last of them may be -1 for the last layer."""
    count = reader.positive("num_hidden_layers")
    interval = reader.positive("moe_layer_interval", 1)
    first, last = reader.integer("moe_layer_start_index", 1), reader.integer("moe_layer_end_index", -1)
    last = count - 1 if last == -1 else last
    return [(index + 1) % interval == 0 and first <= index <= last for index in range(count)]
