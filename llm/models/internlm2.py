"""InternLM 2 and 2.5: Llama with names of its own and one tensor of queries, keys and values."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)

_LAYER = (
    ("attention.wqkv", "self_attn.qkv_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
)


class InternLM2ForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"gate_up_proj": ["gate_proj", "up_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"model.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("model.tok_embeddings", "model.embed_tokens"),
        ("output", "lm_head"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore("attn_implementation")
        rope, norm, bias = reader.rope(), read_rms_norm(reader), reader.boolean("bias", True)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qkv_by_key_head=True),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope))
