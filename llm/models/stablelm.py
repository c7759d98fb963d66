"""StableLM 3B and 2: Llama with LayerNorm and partial rotary embedding; some have a parallel residual."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    Norms,
    ParallelNorms,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
)


class StableLmForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("qk_layernorm", False)  # stablelm-2-12b alone: a norm for each head
        rope, norm = reader.rope(default_share=0.25), read_layer_norm(reader)
        is_parallel = reader.boolean("use_parallel_residual", False)
        norms: Norms = ParallelNorms(norm) if is_parallel else PreNorms(norm)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=reader.boolean("use_qkv_bias", False)),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=norms,
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096))
