"""Command R, R7B and A."""

from dataclasses import replace

from llm.models import decoder as d


class CohereForCausalLM(d.DecoderForCausalLM):
    """Command R: parallel residual, LayerNorm without bias, interleaved rotary embedding, scaled logits."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("use_qk_norm", False)  # command-r-plus alone: a norm for each head
        rope = reader.rope(500_000.0)
        return _decoder(reader, rope, [_attention(reader, rope)] * reader.positive("num_hidden_layers"))


def _attention(reader: d.ConfigReader, rope: d.RopeParameters) -> d.AttentionConfig:
    return d.read_attention(reader, rope, rope_interleaved=True)


def _decoder(reader: d.ConfigReader, rope: d.RopeParameters, attention: list[d.AttentionConfig]) -> d.DecoderConfig:
    """All that is around the attention layers of Command R, R7B and A."""
    norm = d.read_layer_norm(reader, has_bias=False)
    return d.uniform_decoder(
        reader,
        attention,
        norm,
        norms=d.ParallelNorms(norm),
        rope=rope,
        positions=8192,
        tied=True,
        logits_divisor=1.0 / reader.positive_number("logit_scale", 0.0625),
    )


class Cohere2ForCausalLM(d.DecoderForCausalLM):
    """Command R7B and A: Command R with a window on three of four layers; the others have no rotary embedding."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        pattern = reader.positive("sliding_window_pattern", reader.positive("_sliding_window_pattern", 4))
        _expect_older_keys(reader, pattern)
        rope = reader.rope()
        attention, windows = _attention(reader, rope), d.windows_by_pattern(reader, pattern)
        parts = [replace(attention, sliding_window=size, rope=rope if size else None) for size in windows]
        return _decoder(reader, rope, parts)


def _expect_older_keys(reader: d.ConfigReader, pattern: int) -> None:
    """What the published files carry and transformers does not read."""
    reader.expect("layer_switch", pattern)
    reader.expect("order_of_interleaved_layers", "local_attn_first")
    reader.expect("position_embedding_type", "rope_gptj")
    reader.expect("rotary_pct", 1.0)
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"):
        reader.expect(key, True)
