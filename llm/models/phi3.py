"""Phi-3 and 3.5: fused projections in the checkpoint, LongRoPE, in some a partial rotation."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, LayerConfig, decoder_sizes, longest_sequence
from llm.models.config_reader import ConfigReader


class Phi3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        # transformers reads it and never adds one.
        reader.expect("attention_bias", False)
        # Of Phi-4-mini, at the values that change nothing.
        reader.expect("mlp_bias", False)
        reader.expect("full_attn_mod", 1)
        reader.expect("interpolate_factor", 1)
        sizes = decoder_sizes(reader)
        config = DecoderConfig(
            **(sizes | {"norm_eps": reader.number("rms_norm_eps", 1e-5)}),
            max_position_embeddings=longest_sequence(reader, rope, 4096),
            layers=(LayerConfig(reader.optional_integer("sliding_window"), rope),)
            * reader.positive("num_hidden_layers"),
            activation=reader.string("hidden_act", "silu"),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
