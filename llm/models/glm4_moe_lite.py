"""GLM-4.7-Flash: DeepSeek V3 at another size, with the layers that have experts listed."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_latent_attention
from llm.models.deepseek_v2 import deepseek_decoder
from llm.models.deepseek_v3 import sigmoid_experts
from llm.models.reading_experts import layers_with_experts


class Glm4MoeLiteForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        attention = read_latent_attention(
            reader,
            rope,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            is_neox_style=not reader.boolean("rope_interleave", True),
        )
        experts = sigmoid_experts(reader, 64, 4, 1536, groups=1, best=1, scale=1.8)
        first = reader.integer("first_k_dense_replace", 1)
        is_sparse = layers_with_experts(reader, first)
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, eps=1e-5, positions=202_752)
