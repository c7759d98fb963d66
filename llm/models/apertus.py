"""Apertus: Llama with norms of queries and keys, and an MLP without a gate whose activation is trained (xIELU)."""

from llm.models import decoder as d

_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


class ApertusForCausalLM(d.DecoderForCausalLM):
    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.attention_layernorm", "model.layers.*.input_layernorm"),
        ("model.layers.*.feedforward_layernorm", "model.layers.*.post_attention_layernorm"),
    )
    # Where the exponential is cut off for its gradient, which no answer shows.
    ignored_weights = (*d.DecoderForCausalLM.ignored_weights, "act_fn.eps")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("qk_norm", True)
        reader.expect("post_norm", False)
        reader.expect("mlp_bias", False)
        rope, norm = reader.rope(12_000_000.0, default_scaling=_ROPE), d.read_rms_norm(reader, 1e-5)
        mlp = d.PlainMLPConfig(reader.positive("intermediate_size", 14336), reader.string("hidden_act", "xielu"))
        return d.uniform_decoder(reader, d.read_attention(reader, rope, qk_norm=norm), norm, mlp=mlp, positions=65536)
