"""Persimmon: LayerNorm (on each head too), partial rotary embedding, relu squared, a fused QKV tensor."""

from llm.models import decoder as d

_LAYER = (
    ("self_attn.query_key_value", "self_attn.qkv_proj"),
    ("self_attn.dense", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)


class PersimmonForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.NOTHING_PACKED
    renames = (
        *((f"model.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        norm = d.read_layer_norm(reader)
        attention = d.AttentionConfig(
            d.read_heads(reader),
            reader.rope(default_share=0.5),
            qkv_bias=True,
            out_bias=True,
            qkv_by_key_head=True,
            qk_norm=norm if reader.boolean("qk_layernorm", True) else None,
        )
        mlp = d.read_plain_mlp(reader, "relu2", bias=True)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=16384)
