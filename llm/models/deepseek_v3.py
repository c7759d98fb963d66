"""DeepSeek V3 and R1: DeepSeek V2 with sigmoid scores and a bias for choosing; multi-token prediction drafts."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, MoEConfig, read_latent_attention
from llm.models.deepseek_v2 import deepseek_decoder, dense_first, shared_size


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        attention = read_latent_attention(reader, rope, is_neox_style=not reader.boolean("rope_interleave", True))
        experts = sigmoid_experts(reader, 256, 8, 2048, groups=8, best=4, scale=2.5)
        is_sparse = dense_first(reader, reader.integer("first_k_dense_replace", 3))
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, positions=4096)


def sigmoid_experts(
    reader: ConfigReader, count: int, top_k: int, size: int, *, groups: int, best: int, scale: float
) -> MoEConfig:
    """Experts chosen by sigmoid scores with a bias; the arguments are what missing keys stand for."""
    reader.expect("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 has the method's name there
    reader.expect("topk_method", "noaux_tc")
    return MoEConfig(
        reader.positive("n_routed_experts", count),
        reader.positive("num_experts_per_tok", top_k),
        reader.positive("moe_intermediate_size", size),
        reader.string("hidden_act", "silu"),
        renormalize=reader.boolean("norm_topk_prob", True),
        scoring="sigmoid",
        correction_bias=True,
        groups=reader.positive("n_group", groups),
        topk_group=reader.positive("topk_group", best),
        routed_scaling_factor=reader.number("routed_scaling_factor", scale),
        shared_size=shared_size(reader, 1, size),
    )
