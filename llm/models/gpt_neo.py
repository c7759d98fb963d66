"""GPT-Neo: GPT-2 with a window in every other layer, scores that are not scaled, and no bias on q, k and v."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    Heads,
    LayerConfig,
    LearnedPositions,
    PlainMLPConfig,
    PreNorms,
    read_layer_norm,
)

_LAYER = (
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
    ("attn.attention.out_proj", "self_attn.o_proj"),
    ("attn.attention", "self_attn"),
    ("mlp.c_fc", "mlp.up_proj"),
    ("mlp.c_proj", "mlp.down_proj"),
)


class GPTNeoForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.wpe", "model.embed_positions"),
        ("transformer.ln_f", "model.norm"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights: ClassVar[tuple[str, ...]] = ("attn.attention.bias", "attn.attention.masked_bias")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        hidden, heads = reader.positive("hidden_size", 2048), reader.positive("num_heads", 16)
        reader.ignore("resid_dropout", "embed_dropout")
        positions, norm = (
            reader.positive("max_position_embeddings", 2048),
            read_layer_norm(reader, "layer_norm_epsilon"),
        )
        mlp = PlainMLPConfig(
            reader.positive("intermediate_size", 4 * hidden), reader.string("activation_function", "gelu_new"), True
        )

        def layer(window: int | None) -> LayerConfig:
            attention = AttentionConfig(
                Heads(heads, heads, hidden // heads), sliding_window=window, out_bias=True, scale=1.0
            )
            return LayerConfig(attention=attention, mlp=mlp, norms=PreNorms(norm))

        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size", 50257),
            hidden_size=hidden,
            max_position_embeddings=positions,
            layers=tuple(map(layer, _windows(reader))),
            final_norm=norm,
            learned_positions=LearnedPositions(positions),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config


def _windows(reader: ConfigReader) -> list[int | None]:
    """The window of each layer, from `attention_layers`, or as transformers writes them: ([kinds, repeats], ...)."""
    count, window = reader.positive("num_layers", 24), reader.positive("window_size", 256)
    reader.ignore("attention_types")
    kinds = reader.names("attention_layers")
    if kinds is None:
        given = reader.raw.get("attention_types", [[["global", "local"], count // 2]])
        try:
            kinds = [kind for names, repeats in given for kind in names * min(int(repeats), count)]
        except (TypeError, ValueError):
            kinds = []
    if len(kinds) != count or set(kinds) - {"global", "local"}:
        raise reader.error("attention_types", kinds, f"{count} of 'global' or 'local', as [[kinds, repeats], ...]")
    return [window if kind == "local" else None for kind in kinds]
