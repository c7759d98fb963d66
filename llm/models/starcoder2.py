"""StarCoder 2: rotary embedding, LayerNorm, biases, an MLP without a gate; some checkpoints have a window."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    PlainMLPConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
)


class Starcoder2ForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.mlp.c_fc", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.c_proj", "model.layers.*.mlp.down_proj"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        _expect_older_keys(reader)
        rope, norm = reader.rope(), read_layer_norm(reader, "norm_epsilon")
        bias = reader.boolean("use_bias", True)
        attention = AttentionConfig(
            read_heads(reader, default_kv_heads=2),
            rope,
            reader.optional_integer("sliding_window"),
            qkv_bias=bias,
            out_bias=bias,
        )
        activation = reader.string("hidden_act", "gelu_pytorch_tanh")
        mlp = PlainMLPConfig(reader.positive("intermediate_size"), activation, bias)
        layer = LayerConfig(attention=attention, mlp=mlp, norms=PreNorms(norm))
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096), tied=True)


def _expect_older_keys(reader: ConfigReader) -> None:
    """What the published files carry and transformers does not read; softmax is float32 here anyway."""
    reader.expect("norm_type", "layer_norm")
    reader.expect("mlp_type", "default")
    reader.expect("scale_attn_weights", True)
    for key in ("layer_norm_epsilon", "activation_function", "residual_dropout", "embedding_dropout"):
        reader.expect(key, reader.raw.get(key))
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        reader.boolean(key, True)
