"""Qwen 3: queries and keys are normalised per head, and there are no biases unless config.json says so."""

from __future__ import annotations

from llm.models import decoder as d
from llm.models.qwen2 import qwen_windows
from llm.models.text_part import TextPart, read_text_part


class Qwen3ForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_rms_norm(reader)
        heads = d.read_heads(reader, default_kv_heads=32, default_size=128)
        bias = reader.boolean("attention_bias", False)
        mlp = d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))

        def layer(window: int | None) -> d.LayerConfig:
            attention = d.AttentionConfig(heads, rope, window, qkv_bias=bias, out_bias=bias, qk_norm=norm)
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader, map(layer, qwen_windows(reader)), norm, positions=d.longest_sequence(reader, rope, 32768)
        )


class Qwen3MoeForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        rope, norm = reader.rope(), d.read_rms_norm(reader)
        heads, bias = d.read_heads(reader, default_kv_heads=4), reader.boolean("attention_bias", False)
        # transformers gives every layer a window or none.
        uses_window = reader.boolean("use_sliding_window", False)
        window = reader.optional_integer("sliding_window", 4096)
        reader.integer("max_window_layers", 0)
        activation = reader.string("hidden_act", "silu")
        dense = d.GatedMLPConfig(reader.positive("intermediate_size", 6144), activation)
        sparse = d.MoEConfig(
            reader.positive("num_experts", reader.positive("num_local_experts", 128)),
            reader.positive("num_experts_per_tok", 8),
            reader.positive("moe_intermediate_size", 768),
            activation,
            renormalize=reader.boolean("norm_topk_prob", False),
        )

        def layer(is_sparse: bool) -> d.LayerConfig:
            attention = d.AttentionConfig(
                heads, rope, window if uses_window else None, qkv_bias=bias, out_bias=bias, qk_norm=norm
            )
            return d.LayerConfig(attention=attention, mlp=sparse if is_sparse else dense, norms=d.PreNorms(norm))

        return d.read_decoder(
            reader, map(layer, d.sparse_layers(reader)), norm, positions=d.longest_sequence(reader, rope, 32768)
        )


_OTHERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen3VLForConditionalGeneration(TextPart, Qwen3ForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return read_text_part(reader, Qwen3ForCausalLM, {}, _OTHERS)
