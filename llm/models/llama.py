"""Llama 1 to 3, the models with the same config.json, and `llama_decoder` for those that differ in a few lines."""

from __future__ import annotations

from typing import Any

from llm.models import decoder as d


class LlamaForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        heads, norm = d.read_heads(reader), d.read_rms_norm(reader)
        return llama_decoder(reader, heads, reader.rope(), norm, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def llama_decoder(
    reader: d.ConfigReader,
    heads: d.Heads,
    rope: d.RopeParameters,
    norm: d.NormConfig,
    *,
    positions: int = 2048,
    tied: bool = False,
    mlp_bias: bool = False,
    **attention: Any,
) -> d.DecoderConfig:
    """One layer over and over: norms before its parts and a gated feed-forward; the last thing that a family reads.

    Args:
        positions, tied: what a missing `max_position_embeddings` and `tie_word_embeddings` mean.
        attention: further fields of `AttentionConfig`.
    """
    layer = d.LayerConfig(
        attention=d.AttentionConfig(heads, rope, **attention),
        mlp=d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"), mlp_bias),
        norms=d.PreNorms(norm),
    )
    return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, positions), tied=tied)


class ArceeForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm, bias = reader.rope(), d.read_rms_norm(reader, 1e-5), reader.boolean("attention_bias", False)
        activation, mlp_bias = reader.string("hidden_act", "relu2"), reader.boolean("mlp_bias", False)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size"), activation, mlp_bias),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 4096))


class HeliumForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return llama_decoder(
            reader,
            d.read_heads(reader, default_kv_heads=20, default_size=128),
            reader.rope(100_000.0),
            d.read_rms_norm(reader, 1e-8),
            positions=4096,
            rope_interleaved=True,
            qkv_bias=reader.boolean("attention_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
        )


class SeedOssForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("residual_dropout", reader.raw.get("residual_dropout"))
        return llama_decoder(
            reader,
            d.read_heads(reader, default_kv_heads=8, default_size=128),
            reader.rope(),
            d.read_rms_norm(reader),
            positions=524288,
            qkv_bias=reader.boolean("attention_bias", True),
            out_bias=reader.boolean("attention_out_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
        )


class SmolLM3ForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm, heads = reader.rope(2_000_000.0), d.read_rms_norm(reader), d.read_heads(reader, default_kv_heads=4)
        count = reader.positive("num_hidden_layers")
        interval = reader.positive("no_rope_layer_interval", 4)
        has_rope = reader.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        bias = reader.boolean("attention_bias", False)
        mlp = d.GatedMLPConfig(
            reader.positive("intermediate_size"),
            reader.string("hidden_act", "silu"),
            bias=reader.boolean("mlp_bias", False),
        )

        def layer(window: int | None, rotates: int) -> d.LayerConfig:
            attention = d.AttentionConfig(heads, rope if rotates else None, window, qkv_bias=bias, out_bias=bias)
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader,
            map(layer, _windows(reader, count, has_rope), has_rope),
            norm,
            positions=d.longest_sequence(reader, rope, 32768),
            tied=True,
        )


def _windows(reader: d.ConfigReader, count: int, has_rope: list[int]) -> list[int | None]:
    """The sliding window of each layer: with `use_sliding_window`, layers without rope have one."""
    window = reader.optional_integer("sliding_window")
    use = reader.boolean("use_sliding_window", False)
    reader.integer("max_window_layers", count)  # transformers does not read it either
    sliding = [use and window is not None and not rotates for rotates in has_rope]
    return d.layer_windows(reader, count, window if use else None, sliding)
