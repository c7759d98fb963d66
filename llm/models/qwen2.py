"""Qwen 2 and 2.5: biases on query, key and value; optionally sliding windows on the later layers."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreNorms,
    layer_windows,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class Qwen2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm, heads = reader.rope(), read_rms_norm(reader), read_heads(reader, default_kv_heads=32)
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))
        return read_decoder(
            reader,
            [
                LayerConfig(
                    attention=AttentionConfig(heads, rope, window, qkv_bias=True), mlp=mlp, norms=PreNorms(norm)
                )
                for window in qwen_windows(reader)
            ],
            norm,
            positions=longest_sequence(reader, rope, 32768),
        )


def qwen_windows(reader: ConfigReader) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)
    first = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and window is not None and index >= first for index in range(count)]
    return layer_windows(reader, count, window if use else None, sliding)
