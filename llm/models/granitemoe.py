"""Granite 3 MoE: Granite with experts, whose weights the checkpoint stores stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, MoEConfig
from llm.models.decoder.moe import down, gate_and_up
from llm.models.granite import granite_decoder
from llm.models.interface import Cut
from llm.models.reading_experts import ignore_training


class GraniteMoeForCausalLM(DecoderForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
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
        mlp = MoEConfig(
            reader.positive("num_local_experts", 8),
            reader.positive("num_experts_per_tok", 2),
            reader.positive("intermediate_size"),
            reader.string("hidden_act", "silu"),
        )
        return granite_decoder(reader, mlp)
