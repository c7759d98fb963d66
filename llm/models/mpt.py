"""MPT: ALiBi, LayerNorm without a bias, a fused QKV tensor that may be clamped."""

from llm.models import decoder as d

_LAYER = (
    ("attn.Wqkv", "self_attn.qkv_proj"),
    ("attn.out_proj", "self_attn.o_proj"),
    ("ffn.up_proj", "mlp.up_proj"),
    ("ffn.down_proj", "mlp.down_proj"),
    ("norm_1", "input_layernorm"),
    ("norm_2", "post_attention_layernorm"),
)


class MptForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"transformer.blocks.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.norm_f", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        hidden, heads = reader.positive("d_model", 2048), reader.positive("n_heads", 16)
        reader.expect("no_bias", True)
        reader.expect("expansion_ratio", 4)
        reader.expect("norm_type", "low_precision_layernorm", "layernorm")
        for key in ("embedding_fraction", "init_config", "init_device", "tokenizer_name", "verbose"):
            reader.ignore(key)
        reader.ignore("learned_pos_emb", "emb_pdrop")  # ALiBi is in their place
        norm = d.read_layer_norm(reader, "layer_norm_epsilon", has_bias=False)
        layer = d.LayerConfig(
            attention=_attention(reader, d.Heads(heads, heads, hidden // heads)),
            mlp=d.PlainMLPConfig(4 * hidden, "gelu"),
            norms=d.PreNorms(norm),
        )
        config = d.DecoderConfig(
            vocab_size=reader.positive("vocab_size", 50368),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("max_seq_len", 2048),
            layers=(layer,) * reader.positive("n_layers", 24),
            final_norm=norm,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        )
        reader.finish()
        return config


def _attention(reader: d.ConfigReader, heads: d.Heads) -> d.AttentionConfig:
    """From the object under "attn_config"."""
    inner = d.ConfigReader(reader.nested("attn_config"), "config.json, attn_config")
    inner.expect("attn_type", "multihead_attention")
    inner.expect("alibi", True)
    inner.expect("alibi_bias_max", 8)
    inner.expect("prefix_lm", False)
    inner.expect("qk_ln", False)
    inner.ignore("attn_impl", "attn_uses_sequence_id")
    config = d.AttentionConfig(
        heads,
        qkv_limit=inner.optional_number("clip_qkv"),
        scale=inner.optional_number("softmax_scale"),
        alibi_slopes=d.alibi_slopes(heads.query),
    )
    inner.finish()
    return config
