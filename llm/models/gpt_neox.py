"""GPT-NeoX and Pythia: parallel residual with two LayerNorms, a fused QKV tensor, partial rotary embedding."""

from llm.models import decoder as d

_LAYER = (
    ("attention.query_key_value", "self_attn.qkv_proj"),
    ("attention.dense", "self_attn.o_proj"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)


class GPTNeoXForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"gpt_neox.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("gpt_neox.embed_in", "model.embed_tokens"),
        ("gpt_neox.final_layer_norm", "model.norm"),
        ("gpt_neox", "model"),
        ("embed_out", "lm_head"),
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights = (
        "attention.bias",
        "attention.masked_bias",
        "attention.rotary_emb.inv_freq",
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("classifier_dropout", reader.raw.get("classifier_dropout"))
        theta = reader.positive_number("rotary_emb_base", 10000.0, above=1.0)
        rope = reader.rope(theta, default_share=reader.positive_number("rotary_pct", 0.25))
        norm, bias = d.read_layer_norm(reader), reader.boolean("attention_bias", True)
        is_parallel = reader.boolean("use_parallel_residual", True)
        return d.uniform_decoder(
            reader,
            d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qkv_by_key_head=True),
            norm,
            mlp=d.read_plain_mlp(reader, "gelu", bias=True),
            norms=d.ParallelNorms(norm, mlp_has_norm=True) if is_parallel else None,
        )
