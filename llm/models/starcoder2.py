"""StarCoder 2: rotary embedding, LayerNorm, biases, an MLP without a gate; some checkpoints have a window."""

from llm.models import decoder as d


class Starcoder2ForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.mlp.c_fc", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.c_proj", "model.layers.*.mlp.down_proj"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        _expect_older_keys(reader)
        bias = reader.boolean("use_bias", True)
        attention = d.AttentionConfig(
            d.read_heads(reader, default_kv_heads=2),
            reader.rope(),
            reader.optional_positive("sliding_window"),
            qkv_bias=bias,
            out_bias=bias,
        )
        mlp, norm = d.read_plain_mlp(reader, "gelu_pytorch_tanh", bias=bias), d.read_layer_norm(reader, "norm_epsilon")
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=4096, tied=True)


def _expect_older_keys(reader: d.ConfigReader) -> None:
    """What the published files carry and transformers does not read; softmax is float32 here anyway."""
    reader.expect("norm_type", "layer_norm")
    reader.expect("mlp_type", "default")
    reader.expect("scale_attn_weights", True)
    for key in ("layer_norm_epsilon", "activation_function", "residual_dropout", "embedding_dropout"):
        reader.expect(key, reader.raw.get(key))
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        reader.boolean(key, True)
