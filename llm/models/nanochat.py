"""NanoChat: RMS norms without weights, also of the embedding, a rotation the other way round, and relu squared."""

from __future__ import annotations

from dataclasses import replace

from llm.models import decoder as d


class NanoChatForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.mlp.fc1", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.fc2", "model.layers.*.mlp.down_proj"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        rope, norm = replace(reader.rope(), reverse=True), replace(d.read_rms_norm(reader), has_weight=False)
        bias = reader.boolean("attention_bias", False)
        attention = d.AttentionConfig(
            d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_after_rope=True
        )
        layer = d.LayerConfig(
            attention=attention,
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size", 8192), reader.string("hidden_act", "relu2")),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(
            reader,
            layer,
            norm,
            positions=d.longest_sequence(reader, rope),
            embedding_norm=norm,
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 15.0),
        )
