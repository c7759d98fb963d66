"""Phi 1 to 2: parallel residual, partial rotary embedding, LayerNorm, biases (on the logits too)."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    ParallelNorms,
    PlainMLPConfig,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
)


class PhiForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.self_attn.dense", "model.layers.*.self_attn.o_proj"),
        ("model.layers.*.self_attn.q_layernorm", "model.layers.*.self_attn.q_norm"),
        ("model.layers.*.self_attn.k_layernorm", "model.layers.*.self_attn.k_norm"),
        ("model.layers.*.mlp.fc1", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.fc2", "model.layers.*.mlp.down_proj"),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("tie_word_embeddings", False)  # a tied LM head has no bias
        rope, norm = reader.rope(default_share=0.5), read_layer_norm(reader)
        attention = AttentionConfig(
            read_heads(reader),
            rope,
            qkv_bias=True,
            out_bias=True,
            qk_norm=norm if reader.boolean("qk_layernorm", False) else None,
        )
        activation = reader.string("hidden_act", "gelu_new")
        layer = LayerConfig(
            attention=attention,
            mlp=PlainMLPConfig(reader.positive("intermediate_size"), activation, bias=True),
            norms=ParallelNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope), lm_head_bias=True)
