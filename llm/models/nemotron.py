"""Nemotron 3 and 4, Minitron, and Jais 2."""

from llm.models import decoder as d


class NemotronForCausalLM(d.DecoderForCausalLM):
    """Nemotron 3 and 4, Minitron: LayerNorm with weight + 1, partial rotary embedding, an ungated relu squared MLP."""

    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        mlp = d.read_plain_mlp(reader, "relu2", bias=reader.boolean("mlp_bias", False))
        attention = d.read_attention(reader, reader.rope(default_share=0.5))
        norm = d.read_layer_norm(reader, "norm_eps", d.LayerNorm1P)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, positions=4096)


class Jais2ForCausalLM(d.DecoderForCausalLM):
    """Jais 2: Llama with layer norms and a plain feed-forward of squared ReLU."""

    packed_modules_mapping = d.QKV_PACKED

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        bias = reader.boolean("attention_bias", True)
        mlp = d.read_plain_mlp(reader, "relu2", bias=reader.boolean("mlp_bias", True))
        attention = d.AttentionConfig(d.read_heads(reader), reader.rope(), qkv_bias=bias, out_bias=bias)
        return d.uniform_decoder(reader, attention, d.read_layer_norm(reader), mlp=mlp, positions=8192)
