"""StableLM 3B and 2: Llama with LayerNorm and partial rotary embedding; some have a parallel residual."""

from llm.models import decoder as d


class StableLmForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("qk_layernorm", False)  # stablelm-2-12b alone: a norm for each head
        rope, norm = reader.rope(default_share=0.25), d.read_layer_norm(reader)
        norms = d.ParallelNorms(norm) if reader.boolean("use_parallel_residual", False) else None
        attention = d.AttentionConfig(d.read_heads(reader), rope, qkv_bias=reader.boolean("use_qkv_bias", False))
        return d.uniform_decoder(reader, attention, norm, norms=norms, positions=4096)
