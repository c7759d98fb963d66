"""OPT: learned positions, LayerNorm, biases everywhere, a plain MLP."""

from llm.models import decoder as d

# Position 0 is row 2 of the table, because of the padding ids in its training code.
_POSITION_OFFSET = 2


class OPTForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.decoder.layers.*.self_attn.out_proj", "model.layers.*.self_attn.o_proj"),
        ("model.decoder.layers.*.self_attn_layer_norm", "model.layers.*.input_layernorm"),
        ("model.decoder.layers.*.final_layer_norm", "model.layers.*.post_attention_layernorm"),
        ("model.decoder.layers.*.fc1", "model.layers.*.mlp.up_proj"),
        ("model.decoder.layers.*.fc2", "model.layers.*.mlp.down_proj"),
        ("model.decoder.final_layer_norm", "model.norm"),
        ("model.decoder", "model"),
        ("decoder", "model"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        positions = reader.positive("max_position_embeddings", 2048)
        # Only opt-350m normalises the sums, has no final norm, and a narrower embedding.
        is_pre_norm = reader.boolean("do_layer_norm_before", True)
        width = reader.positive("word_embed_proj_dim", hidden)
        reader.expect("layer_norm_elementwise_affine", True)
        reader.expect("_remove_final_layer_norm", False)
        for key in ("dropout", "layerdrop", "init_std", "activation_dropout"):
            reader.expect(key, reader.raw.get(key))
        bias = reader.boolean("enable_bias", True)
        norm = d.NormConfig(1e-5, d.LayerNorm)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.Heads(heads, heads, hidden // heads), qkv_bias=bias, out_bias=bias),
            mlp=d.PlainMLPConfig(reader.positive("ffn_dim"), reader.string("activation_function", "relu"), bias=bias),
            norms=d.PreNorms(norm) if is_pre_norm else d.NormedSums(norm),
        )
        return d.read_decoder(
            reader,
            layer,
            norm if is_pre_norm else None,
            positions=positions,
            tied=True,
            embedding_size=None if width == hidden else width,
            learned_positions=d.LearnedPositions(positions + _POSITION_OFFSET, offset=_POSITION_OFFSET),
        )
