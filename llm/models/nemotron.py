"""Nemotron 3 and 4, Minitron: LayerNorm with weight + 1, partial rotary embedding, an ungated relu squared MLP."""

from __future__ import annotations

from llm.models import decoder as d


class NemotronForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(default_share=0.5), d.read_layer_norm(reader, "norm_eps", d.LayerNorm1P)
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        activation = reader.string("hidden_act", "relu2")
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size"), activation, mlp_bias),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 4096))


class Jais2ForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = reader.rope(), d.read_layer_norm(reader)
        bias, mlp_bias = reader.boolean("attention_bias", True), reader.boolean("mlp_bias", True)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "relu2"), mlp_bias),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 8192))
