"""Llama 1 to 3 and the many models that share its config.json."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM
from llm.models.config_reader import ConfigReader


class LlamaForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        heads = reader.positive("num_attention_heads")
        hidden = reader.positive("hidden_size")
        bias = reader.boolean("attention_bias", False)
        reader.expect("hidden_act", "silu")
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=reader.positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=reader.positive("num_key_value_heads", heads),
            head_size=reader.positive("head_dim", hidden // heads),
            max_position_embeddings=reader.positive("max_position_embeddings", 2048),
            norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=reader.rope(),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=reader.boolean("mlp_bias", False),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
