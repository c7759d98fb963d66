"""SmolLM3: Llama in which some layers, every fourth by default, have no rope."""

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


class SmolLM3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm, heads = reader.rope(2_000_000.0), read_rms_norm(reader), read_heads(reader, default_kv_heads=4)
        count = reader.positive("num_hidden_layers")
        interval = reader.positive("no_rope_layer_interval", 4)
        has_rope = reader.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        bias = reader.boolean("attention_bias", False)
        mlp = GatedMLPConfig(
            reader.positive("intermediate_size"),
            reader.string("hidden_act", "silu"),
            bias=reader.boolean("mlp_bias", False),
        )

        def layer(window: int | None, rotates: int) -> LayerConfig:
            attention = AttentionConfig(heads, rope if rotates else None, window, qkv_bias=bias, out_bias=bias)
            return LayerConfig(attention=attention, mlp=mlp, norms=PreNorms(norm))

        return read_decoder(
            reader,
            map(layer, _windows(reader, count, has_rope), has_rope),
            norm,
            positions=longest_sequence(reader, rope, 32768),
            tied=True,
        )


def _windows(reader: ConfigReader, count: int, has_rope: list[int]) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers without rope have one."""
    window = reader.optional_integer("sliding_window")
    use = reader.boolean("use_sliding_window", False)
    reader.integer("max_window_layers", count)  # transformers does not read it either
    sliding = [use and window is not None and not rotates for rotates in has_rope]
    return layer_windows(reader, count, window if use else None, sliding)
