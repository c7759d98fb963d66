"""Command R7B and A: Command R with a window on three of four layers; the others have no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from llm.models.cohere import cohere_attention, cohere_decoder
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, windows_by_pattern


class Cohere2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        pattern = reader.positive("sliding_window_pattern", reader.positive("_sliding_window_pattern", 4))
        _expect_older_keys(reader, pattern)
        rope = reader.rope()
        attention, windows = cohere_attention(reader, rope), windows_by_pattern(reader, 4096, pattern)
        parts = [replace(attention, sliding_window=size, rope=rope if size else None) for size in windows]
        return cohere_decoder(reader, rope, parts)


def _expect_older_keys(reader: ConfigReader, pattern: int) -> None:
    """What the published files carry and transformers does not read."""
    reader.expect("layer_switch", pattern)
    reader.expect("order_of_interleaved_layers", "local_attn_first")
    reader.expect("position_embedding_type", "rope_gptj")
    reader.expect("rotary_pct", 1.0)
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"):
        reader.expect(key, True)
