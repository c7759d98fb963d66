"""NanoChat: RMS norms without weights, also of the embedding, a rotation the other way round, and relu squared."""

from __future__ import annotations

from dataclasses import replace
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
    read_rms_norm,
)


class NanoChatForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.layers.*.mlp.fc1", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.fc2", "model.layers.*.mlp.down_proj"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = replace(reader.rope(), reverse=True), replace(read_rms_norm(reader), has_weight=False)
        bias = reader.boolean("attention_bias", False)
        attention = AttentionConfig(
            read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_after_rope=True
        )
        layer = LayerConfig(
            attention=attention,
            mlp=PlainMLPConfig(reader.positive("intermediate_size", 8192), reader.string("hidden_act", "relu2")),
            norms=PreNorms(norm),
        )
        return read_decoder(
            reader,
            layer,
            norm,
            positions=longest_sequence(reader, rope),
            embedding_norm=norm,
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 15.0),
        )
