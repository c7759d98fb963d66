"""GLM 4.5 and 4.6: experts by DeepSeek V3's rules under grouped attention; multi-token prediction drafts."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import AttentionConfig, DecoderConfig, DecoderForCausalLM, NormConfig, read_heads
from llm.models.deepseek_v2 import deepseek_decoder, dense_first
from llm.models.deepseek_v3 import sigmoid_experts


class Glm4MoeForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope(default_share=0.5)
        norm = NormConfig(reader.positive_number("rms_norm_eps", 1e-5))
        attention = AttentionConfig(
            read_heads(reader, default_kv_heads=8),
            rope,
            qkv_bias=reader.boolean("attention_bias", False),
            qk_norm=norm if reader.boolean("use_qk_norm", False) else None,
        )
        experts = sigmoid_experts(reader, 128, 8, 1408, groups=1, best=1, scale=1.0)
        is_sparse = dense_first(reader, reader.integer("first_k_dense_replace", 1))
        return deepseek_decoder(reader, rope, attention, experts, is_sparse, eps=1e-5, positions=131_072)
