"""dots.llm1: Qwen 3's attention with DeepSeek V3's experts; later layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    layer_windows,
    read_heads,
    read_rms_norm,
)
from llm.models.deepseek_v2 import deepseek_decoder, dense_first
from llm.models.deepseek_v3 import sigmoid_experts


class Dots1ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore("use_sliding_window")  # max_window_layers decides
        rope, norm, heads = reader.rope(), read_rms_norm(reader), read_heads(reader)
        bias = reader.boolean("attention_bias", False)
        attention = AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm)
        count, window = reader.positive("num_hidden_layers"), reader.optional_integer("sliding_window", 4096)
        first = reader.integer("max_window_layers", 62)
        windows = layer_windows(
            reader, count, window, [window is not None and index >= first for index in range(count)]
        )
        experts = replace(
            sigmoid_experts(reader, 128, 6, 1408, groups=1, best=1, scale=1.0),
            renormalize=reader.boolean("norm_topk_prob", False),
        )
        is_sparse = dense_first(reader, reader.integer("first_k_dense_replace", 0))
        parts = [replace(attention, sliding_window=size) for size in windows]
        return deepseek_decoder(reader, rope, parts, experts, is_sparse)
