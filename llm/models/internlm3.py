"""InternLM 3: Llama with other names for its biases."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, read_heads, read_rms_norm
from llm.models.llama import llama_decoder


class InternLM3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        # The published files say qkv_bias and bias; one without the other is refused by transformers too.
        bias = reader.boolean("attention_bias", reader.boolean("qkv_bias", False))
        reader.expect("mlp_bias", bias)
        reader.expect("bias", bias)
        heads = read_heads(reader, default_kv_heads=2, default_size=128)
        biases = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
        return llama_decoder(reader, heads, reader.rope(), read_rms_norm(reader, 1e-5), positions=32768, **biases)
