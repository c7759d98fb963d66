"""BLOOM: ALiBi, a LayerNorm after the embedding, a fused QKV tensor."""

from llm.models import decoder as d

_LAYER = (
    ("self_attention.query_key_value", "self_attn.qkv_proj"),
    ("self_attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)
_MODEL = (
    ("h", "model.layers"),
    ("word_embeddings", "model.embed_tokens"),
    ("word_embeddings_layernorm", "model.embed_norm"),
    ("ln_f", "model.norm"),
)


class BloomForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.NOTHING_PACKED
    # The first checkpoints lack the prefix "transformer.".
    renames = tuple(
        (f"{prefix}{source}", target)
        for prefix in ("transformer.", "")
        for source, target in (*((f"h.*.{old}", f"model.layers.*.{new}") for old, new in _LAYER), *_MODEL)
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # The first checkpoints have names of their own for sizes, and switches of the code that trained them.
        hidden = reader.positive("n_embed", reader.positive("hidden_size", 64))
        heads = reader.positive("n_head", reader.positive("num_attention_heads", 8))
        reader.expect("apply_residual_connection_post_layernorm", False)
        reader.expect("n_inner", 4 * hidden)
        reader.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
        reader.ignore("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id")
        norm = d.read_layer_norm(reader, "layer_norm_epsilon")
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                d.Heads(heads, heads, hidden // heads),
                qkv_bias=True,
                out_bias=True,
                qkv_by_key_head=True,
                alibi_slopes=d.alibi_slopes(heads),
            ),
            mlp=d.PlainMLPConfig(4 * hidden, "gelu_new", bias=True),
            norms=d.PreNorms(norm),
        )
        config = d.DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("seq_length", 2048),
            layers=(layer,) * reader.positive("n_layer", reader.positive("num_hidden_layers", 2)),
            final_norm=norm,
            embedding_norm=norm,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config
