"""SantaCoder and StarCoder: GPT-2 with one key head."""

from __future__ import annotations

from typing import ClassVar

from llm.layers.norm import LayerNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    Heads,
    LayerConfig,
    LearnedPositions,
    NormConfig,
    PlainMLPConfig,
    PreNorms,
)
from llm.models.gpt2 import GPT2LMHeadModel


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    transposed_weights: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        hidden, heads = reader.positive("n_embd"), reader.positive("n_head")
        positions = reader.positive("n_positions", 1024)
        reader.expect("scale_attn_weights", True)
        # Softmax is float32 here anyway, and the others say how transformers' older code ran.
        for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "validate_runner_input"):
            reader.boolean(key, True)
        for key in ("inference_runner", "pre_allocate_kv_cache", "pad_key_length", "max_batch_size"):
            reader.expect(key, reader.raw.get(key))
        norm = NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5), LayerNorm)
        key_heads = 1 if reader.boolean("multi_query", True) else heads
        reader.expect("num_key_value_heads", key_heads)
        activation = reader.string("activation_function", "gelu_pytorch_tanh")
        layer = LayerConfig(
            attention=AttentionConfig(
                Heads(heads, key_heads, hidden // heads), qkv_bias=True, out_bias=True, qkv_by_key_head=True
            ),
            mlp=PlainMLPConfig(reader.positive("n_inner", 4 * hidden), activation, bias=True),
            norms=PreNorms(norm),
        )
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=positions,
            layers=(layer,) * reader.positive("n_layer"),
            final_norm=norm,
            learned_positions=LearnedPositions(positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config
