"""LFM2 with experts: the first layers have a feed-forward, the others experts chosen by sigmoid scores."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, GatedMLPConfig, MoEConfig
from llm.models.decoder.part import PartConfig
from llm.models.lfm2 import Lfm2ForCausalLM, lfm2_decoder
from llm.models.reading_experts import ignore_training

_LAYER = "model.layers.*"


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    renames = (
        (f"{_LAYER}.feed_forward.experts.*.w1", f"{_LAYER}.mlp.experts.*.gate_proj"),
        (f"{_LAYER}.feed_forward.experts.*.w2", f"{_LAYER}.mlp.experts.*.down_proj"),
        (f"{_LAYER}.feed_forward.experts.*.w3", f"{_LAYER}.mlp.experts.*.up_proj"),
        (f"{_LAYER}.feed_forward.expert_bias", f"{_LAYER}.mlp.gate.e_score_correction_bias"),
        *Lfm2ForCausalLM.renames,
        (f"{_LAYER}.feed_forward", f"{_LAYER}.mlp"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        dense: PartConfig = GatedMLPConfig(reader.positive("intermediate_size", 7168), "silu")
        sparse = MoEConfig(
            reader.positive("num_experts", 32),
            reader.positive("num_experts_per_tok", 4),
            reader.positive("moe_intermediate_size", 1792),
            "silu",
            renormalize=reader.boolean("norm_topk_prob", True),
            scoring="sigmoid",
            correction_bias=reader.boolean("use_expert_bias", True),
            routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
        )
        first = reader.integer("num_dense_layers", 2)
        count = reader.positive("num_hidden_layers")
        return lfm2_decoder(reader, [dense if index < first else sparse for index in range(count)])
