"""Granite MoE with a feed-forward that every token has."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, MoEConfig
from llm.models.granite import granite_decoder
from llm.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from llm.models.reading_experts import ignore_training


class GraniteMoeSharedForCausalLM(GraniteMoeHybridForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        mlp = MoEConfig(
            reader.positive("num_local_experts", 8),
            reader.positive("num_experts_per_tok", 2),
            reader.positive("intermediate_size"),
            reader.string("hidden_act", "silu"),
            shared_size=reader.integer("shared_intermediate_size", 0) or None,
        )
        return granite_decoder(reader, mlp)
