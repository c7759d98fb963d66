"""EXAONE 4: post-norms and QK norm per head; in models with windows, full-attention layers have no rope."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PostNorms,
    layer_windows,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class Exaone4ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm, heads = reader.rope(), read_rms_norm(reader, 1e-5), read_heads(reader)
        window = reader.optional_integer("sliding_window", 4096)
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))

        def layer(size: int | None) -> LayerConfig:
            rotates = size is not None or window is None
            attention = AttentionConfig(heads, rope if rotates else None, size, qk_norm=norm)
            return LayerConfig(attention=attention, mlp=mlp, norms=PostNorms(norm))

        layers = [layer(size) for size in exaone_windows(reader, window)]
        return read_decoder(reader, layers, norm, positions=longest_sequence(reader, rope))


def exaone_windows(reader: ConfigReader, window: int | None) -> list[int | None]:
    """`sliding_window_pattern` is a number n, every nth layer sees all, or "LLLG", letters for local and global."""
    count, given = reader.positive("num_hidden_layers"), reader.raw.get("sliding_window_pattern", 4)
    if isinstance(given, str):
        pattern = reader.string("sliding_window_pattern")
        if set(pattern) - set("LG") or not pattern:
            raise reader.error("sliding_window_pattern", pattern, "a number, or letters L and G")
        local = [pattern[index % len(pattern)] == "L" for index in range(count)]
    else:
        every = reader.integer("sliding_window_pattern", 4)
        local = [every > 0 and (index + 1) % every != 0 for index in range(count)]
    return layer_windows(reader, count, window, [window is not None and is_local for is_local in local])
