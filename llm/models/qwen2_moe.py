"""Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2 with experts, and a shared expert behind a gate of its own."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    MoEConfig,
    PartConfig,
    PreNorms,
    layer_windows,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.reading_experts import ignore_training, sparse_layers


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    renames = (("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        rope, norm = reader.rope(), read_rms_norm(reader)
        heads, bias = read_heads(reader, default_kv_heads=16), reader.boolean("qkv_bias", True)
        activation = reader.string("hidden_act", "silu")
        dense = GatedMLPConfig(reader.positive("intermediate_size", 5632), activation)
        sparse = MoEConfig(
            reader.positive("num_experts", 60),
            reader.positive("num_experts_per_tok", 4),
            reader.positive("moe_intermediate_size", 1408),
            activation,
            renormalize=reader.boolean("norm_topk_prob", False),
            shared_size=reader.positive("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        )

        def layer(window: int | None, is_sparse: bool) -> LayerConfig:
            mlp: PartConfig = sparse if is_sparse else dense
            return LayerConfig(
                attention=AttentionConfig(heads, rope, window, qkv_bias=bias), mlp=mlp, norms=PreNorms(norm)
            )

        return read_decoder(
            reader,
            map(layer, _windows(reader), sparse_layers(reader)),
            norm,
            positions=longest_sequence(reader, rope, 32768),
        )


def _windows(reader: ConfigReader) -> list[int | None]:
    """Of each layer: with `use_sliding_window` every second one before `max_window_layers` has one."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)
    first_full = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and index % 2 == 0 and index < first_full for index in range(count)]
    return layer_windows(reader, count, window if use else None, sliding)
