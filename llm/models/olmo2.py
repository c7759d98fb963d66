"""OLMo 2: norms on the blocks' outputs, queries and keys normalised over all heads together."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, LayerConfig, decoder_sizes, longest_sequence
from llm.models.config_reader import ConfigReader


class Olmo2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        bias = reader.boolean("attention_bias", False)
        sizes = decoder_sizes(reader)
        config = DecoderConfig(
            **(sizes | {"norm_eps": reader.number("rms_norm_eps", 1e-5)}),
            max_position_embeddings=longest_sequence(reader, rope),
            layers=(LayerConfig(rope=rope),) * reader.positive("num_hidden_layers"),
            norm_placement="post",
            activation=reader.string("hidden_act", "silu"),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="all",
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
