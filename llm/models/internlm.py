"""InternLM 2 to 3."""

from typing import ClassVar

from llm.models import decoder as d

_LAYER = (
    ("attention.wqkv", "self_attn.qkv_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
)


class InternLM2ForCausalLM(d.DecoderForCausalLM):
    """InternLM 2 and 2.5: Llama with names of its own and one tensor of queries, keys and values."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"gate_up_proj": ["gate_proj", "up_proj"]}
    renames = (
        *((f"model.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("model.tok_embeddings", "model.embed_tokens"),
        ("output", "lm_head"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore("attn_implementation")
        bias = reader.boolean("bias", True)
        attention = d.AttentionConfig(
            d.read_heads(reader), reader.rope(), qkv_bias=bias, out_bias=bias, qkv_by_key_head=True
        )
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader))


class InternLM3ForCausalLM(d.DecoderForCausalLM):
    """InternLM 3: Llama with other names for its biases."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # The published files say qkv_bias and bias; one without the other is refused by transformers too.
        bias = reader.boolean("attention_bias", reader.boolean("qkv_bias", False))
        reader.expect("mlp_bias", bias)
        reader.expect("bias", bias)
        heads = d.read_heads(reader, default_kv_heads=2, default_size=128)
        attention = d.AttentionConfig(heads, reader.rope(), qkv_bias=bias, out_bias=bias)
        mlp, norm = d.read_gated_mlp(reader, bias=bias), d.read_rms_norm(reader, 1e-5)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=32768)
