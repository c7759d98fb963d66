"""Qwen 2 and 2.5: biases on query, key and value; windows on the later layers when switched on."""

from __future__ import annotations

from llm.layers.rotary import RopeParameters
from llm.models.blocks import (
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    decoder_sizes,
    layer_windows,
    longest_sequence,
)
from llm.models.config_reader import ConfigReader


class Qwen2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        config = DecoderConfig(
            **decoder_sizes(reader, default_kv_heads=32),
            max_position_embeddings=longest_sequence(reader, rope, 32768),
            layers=qwen_layers(reader, rope),
            activation=reader.string("hidden_act", "silu"),
            qkv_bias=True,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config


def qwen_layers(reader: ConfigReader, rope: RopeParameters) -> tuple[LayerConfig, ...]:
    """With `use_sliding_window` the layers from `max_window_layers` on have a window."""
    count = reader.positive("num_hidden_layers")
    window = reader.optional_integer("sliding_window", 4096)
    first = reader.integer("max_window_layers", 28)
    use = reader.boolean("use_sliding_window", False)
    sliding = [use and window is not None and index >= first for index in range(count)]
    return tuple(LayerConfig(size, rope) for size in layer_windows(reader, count, window if use else None, sliding))
