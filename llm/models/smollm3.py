"""SmolLM3: Llama in which some layers, every fourth by default, have no rope."""

from __future__ import annotations

from llm.models.blocks import (
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    decoder_sizes,
    layer_windows,
    longest_sequence,
)
from llm.models.config_reader import ConfigReader


class SmolLM3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope(2_000_000.0)
        count = reader.positive("num_hidden_layers")
        interval = reader.positive("no_rope_layer_interval", 4)
        has_rope = reader.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        window = reader.optional_integer("sliding_window")
        use = reader.boolean("use_sliding_window", False)
        reader.integer("max_window_layers", count)  # transformers does not read it either
        sliding = [use and window is not None and not rotates for rotates in has_rope]
        windows = layer_windows(reader, count, window if use else None, sliding)
        bias = reader.boolean("attention_bias", False)
        config = DecoderConfig(
            **decoder_sizes(reader, default_kv_heads=4),
            max_position_embeddings=longest_sequence(reader, rope, 32768),
            layers=tuple(
                LayerConfig(size, rope if rotates else None) for size, rotates in zip(windows, has_rope, strict=False)
            ),
            activation=reader.string("hidden_act", "silu"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=reader.boolean("mlp_bias", False),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config
