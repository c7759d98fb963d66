"""GPT-2: learned positions, LayerNorm, biases, and weights that the checkpoint stores transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm.layers.norm import LayerNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    Heads,
    LayerConfig,
    LearnedPositions,
    NormConfig,
    PlainMLPConfig,
    PreNorms,
)

_LAYER = (
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
    ("attn.c_attn", "self_attn.qkv_proj"),
    ("attn.c_proj", "self_attn.o_proj"),
    ("mlp.c_fc", "mlp.up_proj"),
    ("mlp.c_proj", "mlp.down_proj"),
)
_MODEL = (("wte", "model.embed_tokens"), ("wpe", "model.embed_positions"), ("ln_f", "model.norm"))


class GPT2LMHeadModel(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    # The first checkpoints lack the prefix "transformer.".
    renames: ClassVar[tuple[tuple[str, str], ...]] = tuple(
        (f"{prefix}{source}", target)
        for prefix in ("transformer.", "")
        for source, target in (*((f"h.*.{old}", f"model.layers.*.{new}") for old, new in _LAYER), *_MODEL)
    )
    # Causal masks that old checkpoints store as tensors.
    ignored_weights: ClassVar[tuple[str, ...]] = ("attn.bias", "attn.masked_bias")
    transposed_weights: ClassVar[tuple[str, ...]] = tuple(f"{name}_proj.weight" for name in ("qkv", "o", "up", "down"))

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        hidden, heads = reader.positive("n_embd"), reader.positive("n_head")
        positions = reader.positive("n_positions", 1024)
        reader.expect("n_ctx", positions)
        reader.expect("scale_attn_weights", True)
        reader.boolean("reorder_and_upcast_attn", False)  # the scores' precision, which is float32 here anyway
        norm = NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5), LayerNorm)
        attention = AttentionConfig(Heads(heads, heads, hidden // heads), qkv_bias=True, out_bias=True)
        layer = LayerConfig(
            attention=attention,
            mlp=PlainMLPConfig(
                reader.positive("n_inner", 4 * hidden), reader.string("activation_function", "gelu_new"), bias=True
            ),
            norms=PreNorms(norm),
        )
        layers = [layer] * reader.positive("n_layer")
        if reader.boolean("scale_attn_by_inverse_layer_idx", False):
            scales = [attention.heads.size**-0.5 / number for number in range(1, len(layers) + 1)]
            layers = [replace(layer, attention=replace(attention, scale=scale)) for scale in scales]
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=positions,
            layers=tuple(layers),
            final_norm=norm,
            learned_positions=LearnedPositions(positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config
