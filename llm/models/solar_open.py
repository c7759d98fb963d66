"""Solar Open: Llama's attention with DeepSeek V3's experts in every layer."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import AttentionConfig, DecoderConfig, DecoderForCausalLM, read_heads
from llm.models.deepseek_v2 import deepseek_decoder, dense_first
from llm.models.deepseek_v3 import sigmoid_experts


class SolarOpenForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("use_qk_norm", False)
        reader.expect("first_k_dense_replace", 0)
        rope = reader.rope(1_000_000.0)
        attention = AttentionConfig(
            read_heads(reader, default_kv_heads=8, default_size=128),
            rope,
            qkv_bias=reader.boolean("attention_bias", False),
        )
        experts = sigmoid_experts(reader, 128, 8, 1280, groups=1, best=1, scale=1.0)
        return deepseek_decoder(reader, rope, attention, experts, dense_first(reader, 0), eps=1e-5, positions=131_072)
