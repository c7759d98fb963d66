"""Gemma 3, text only: Gemma 2 with normalised queries and keys, and two ropes: windowed layers have their own base.

In EmbeddingGemma tokens see those after them.
"""

from __future__ import annotations

from dataclasses import replace

from llm.layers.norm import GemmaRMSNorm
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, layer_windows, read_rms_norm
from llm.models.gemma2 import gemma_attention, gemma_decoder


class Gemma3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        full, sliding = read_ropes(reader)
        count = reader.positive("num_hidden_layers")
        pattern = reader.positive("sliding_window_pattern", reader.positive("_sliding_window_pattern", 6))
        window = reader.optional_integer("sliding_window", 4096)
        causal = not reader.boolean("use_bidirectional_attention", False)
        if window is not None and not causal:
            window = window // 2 + 1  # of both sides together
        windows = layer_windows(reader, count, window, [(index + 1) % pattern != 0 for index in range(count)])
        soft_cap = reader.optional_number("attn_logit_softcapping")
        qk_norm = read_rms_norm(reader, kind=GemmaRMSNorm)
        attention = replace(gemma_attention(reader), qk_norm=qk_norm, soft_cap=soft_cap, causal=causal)
        config = gemma_decoder(
            reader,
            [replace(attention, sliding_window=size, rope=full if size is None else sliding) for size in windows],
            positions=reader.positive("max_position_embeddings", 131072),
            logits_soft_cap=reader.optional_number("final_logit_softcapping"),
        )
        reader.finish()
        return config


def read_ropes(reader: ConfigReader) -> tuple[RopeParameters, RopeParameters]:
    """(full attention, sliding attention): per layer type since transformers 5, in separate keys before."""
    if "full_attention" in reader.raw.get("rope_parameters", {}):
        return reader.rope(1_000_000.0, "full_attention"), reader.rope(10_000.0, "sliding_attention")
    local = reader.positive_number("rope_local_base_freq", 10_000.0, above=1.0)
    return reader.rope(1_000_000.0), RopeParameters(theta=local)
