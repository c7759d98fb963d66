"""NanoChat: RMS norms without weights, also of the embedding, a rotation the other way round, and relu squared."""

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
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, rope, qk_norm=norm, qk_norm_after_rope=True),
            norm,
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size", 8192), reader.string("hidden_act", "relu2")),
            embedding_norm=norm,
            logits_soft_cap=reader.optional_number("final_logit_softcapping", 15.0),
        )
