"""StableLM 3B and 2: Llama with LayerNorm and partial rotary embedding; some have a parallel residual."""

from __future__ import annotations

from llm.models import decoder as d


class StableLmForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("qk_layernorm", False)  # stablelm-2-12b alone: a norm for each head
        rope, norm = reader.rope(default_share=0.25), d.read_layer_norm(reader)
        is_parallel = reader.boolean("use_parallel_residual", False)
        norms: d.Norms = d.ParallelNorms(norm) if is_parallel else d.PreNorms(norm)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=reader.boolean("use_qkv_bias", False)),
            mlp=d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=norms,
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 4096))
