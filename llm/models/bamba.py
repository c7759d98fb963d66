"""Bamba: Llama with Mamba 2 in the place of most attention."""

from llm.models import decoder as d


class BambaForCausalLM(d.DecoderForCausalLM):
    renames = (
        ("model.layers.*.feed_forward", "model.layers.*.mlp"),
        ("model.layers.*.pre_ff_layernorm", "model.layers.*.post_attention_layernorm"),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("num_logits_to_keep", "z_loss_coefficient")  # of transformers' own forward and of training
        rope, norm = reader.rope(default_share=0.5), d.read_rms_norm(reader, 1e-5)
        heads = d.read_heads(reader, default_kv_heads=8)
        reader.expect("attn_rotary_emb", int(heads.size * rope.partial_rotary_factor))
        attention, mamba = d.read_attention(reader, rope, heads), d.read_mamba2(reader, norm.eps)
        mlp = d.GatedMLPConfig(
            reader.positive("intermediate_size", 14336),
            reader.string("hidden_act", "silu"),
            reader.boolean("mlp_bias", False),
        )
        attends = set(reader.integers("attn_layer_indices") or ())
        return d.read_decoder(
            reader,
            [
                d.LayerConfig(attention=attention if index in attends else mamba, mlp=mlp, norms=d.PreNorms(norm))
                for index in range(reader.positive("num_hidden_layers"))
            ],
            norm,
            positions=d.longest_sequence(reader, rope, 262_144),
        )
