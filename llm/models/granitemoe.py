"""Granite 3 MoE: Granite with experts, whose weights the checkpoint stores stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    MoEConfig,
    ScaledPreNorms,
    longest_sequence,
    read_heads,
    read_rms_norm,
)
from llm.models.decoder.moe import down, gate_and_up
from llm.models.interface import Cut
from llm.models.reading_experts import ignore_training


class GraniteMoeForCausalLM(DecoderForCausalLM):
    renames = (
        ("model.layers.*.block_sparse_moe.router.layer", "model.layers.*.mlp.gate"),
        ("model.layers.*.block_sparse_moe.router", "model.layers.*.mlp.gate"),
        ("model.layers.*.block_sparse_moe", "model.layers.*.mlp"),
    )

    stacked_weights: ClassVar[Mapping[str, Cut]] = {
        "input_linear.weight": gate_and_up,
        "output_linear.weight": down,
        **DecoderForCausalLM.stacked_weights,
    }

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        rope, norm = reader.rope(), read_rms_norm(reader)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader),
                rope,
                qkv_bias=bias,
                out_bias=bias,
                scale=reader.number("attention_multiplier", 1.0),
            ),
            mlp=MoEConfig(
                reader.positive("num_local_experts", 8),
                reader.positive("num_experts_per_tok", 2),
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
            ),
            norms=ScaledPreNorms(norm, reader.number("residual_multiplier", 1.0)),
        )
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            max_position_embeddings=longest_sequence(reader, rope),
            layers=(layer,) * reader.positive("num_hidden_layers"),
            final_norm=norm,
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=reader.positive_number("logits_scaling", 1.0),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
