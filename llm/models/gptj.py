"""GPT-J: parallel residual with one LayerNorm, interleaved partial rotary embedding, a bias on the logits."""

from __future__ import annotations

import math
from typing import ClassVar

from llm.layers.norm import LayerNorm
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    Heads,
    LayerConfig,
    NormConfig,
    ParallelNorms,
    PlainMLPConfig,
)

_LAYER = (
    ("ln_1", "input_layernorm"),
    ("attn.q_proj", "self_attn.q_proj"),
    ("attn.k_proj", "self_attn.k_proj"),
    ("attn.v_proj", "self_attn.v_proj"),
    ("attn.out_proj", "self_attn.o_proj"),
    ("mlp.fc_in", "mlp.up_proj"),
    ("mlp.fc_out", "mlp.down_proj"),
)


class GPTJForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"transformer.h.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights: ClassVar[tuple[str, ...]] = ("attn.bias", "attn.masked_bias", "attn.embed_positions")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        hidden, heads = reader.positive("n_embd"), reader.positive("n_head")
        reader.expect("tie_word_embeddings", False)  # a tied LM head has no bias
        reader.expect("scale_attn_weights", True)
        reader.expect("rotary", True)
        norm = NormConfig(reader.positive_number("layer_norm_epsilon", 1e-5), LayerNorm)
        size = hidden // heads
        # The next float above: the share times the size must not come out below the whole number.
        rotated = math.nextafter(reader.positive("rotary_dim", 64) / size, 2.0)
        rope = RopeParameters(partial_rotary_factor=rotated)
        activation = reader.string("activation_function", "gelu_new")
        layer = LayerConfig(
            attention=AttentionConfig(Heads(heads, heads, size), rope, rope_interleaved=True),
            mlp=PlainMLPConfig(reader.positive("n_inner", 4 * hidden), activation, bias=True),
            norms=ParallelNorms(norm),
        )
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("n_positions", 2048),
            layers=(layer,) * reader.positive("n_layer"),
            final_norm=norm,
            lm_head_bias=True,
        )
        reader.finish()
        return config
