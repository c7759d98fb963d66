"""Phi 1 to 3.5."""

from dataclasses import dataclass, replace

from llm.layers.moe import SparseMixer
from llm.models import decoder as d


class PhiForCausalLM(d.DecoderForCausalLM):
    """Phi 1 to 2: parallel residual, partial rotary embedding, LayerNorm, biases (on the logits too)."""

    packed_modules_mapping = d.QKV_PACKED
    renames = (
        ("model.layers.*.self_attn.dense", "model.layers.*.self_attn.o_proj"),
        ("model.layers.*.self_attn.q_layernorm", "model.layers.*.self_attn.q_norm"),
        ("model.layers.*.self_attn.k_layernorm", "model.layers.*.self_attn.k_norm"),
        ("model.layers.*.mlp.fc1", "model.layers.*.mlp.up_proj"),
        ("model.layers.*.mlp.fc2", "model.layers.*.mlp.down_proj"),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.expect("tie_word_embeddings", False)  # a tied LM head has no bias
        norm = d.read_layer_norm(reader)
        attention = d.AttentionConfig(
            d.read_heads(reader),
            reader.rope(default_share=0.5),
            qkv_bias=True,
            out_bias=True,
            qk_norm=norm if reader.boolean("qk_layernorm", False) else None,
        )
        mlp = d.read_plain_mlp(reader, "gelu_new", bias=True)
        return d.uniform_decoder(reader, attention, norm, mlp=mlp, norms=d.ParallelNorms(norm), lm_head_bias=True)


class Phi3ForCausalLM(d.DecoderForCausalLM):
    """Phi-3 and 3.5: fused projections in the checkpoint, LongRoPE, some with partial rotary embedding."""

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # transformers reads the key and never adds a bias.
        reader.expect("attention_bias", False)
        # Keys of Phi-4-mini, at the values without effect.
        reader.expect("mlp_bias", False)
        reader.expect("full_attn_mod", 1)
        reader.expect("interpolate_factor", 1)
        attention = d.AttentionConfig(d.read_heads(reader), reader.rope(), reader.optional_positive("sliding_window"))
        return d.uniform_decoder(reader, attention, d.read_rms_norm(reader, 1e-5), positions=4096)


_MSCALES = ("short_mscale", "long_mscale")


class PhimoeForCausalLM(d.DecoderForCausalLM):
    """Phi 3.5 MoE: Mixtral with LayerNorm, biases and LongRoPE; its router mixes two experts (arXiv:2409.12136)."""

    renames = (
        ("model.layers.*.mlp.router", "model.layers.*.mlp.gate"),
        ("model.layers.*.block_sparse_moe.router", "model.layers.*.mlp.gate"),
        *d.W1_W2_W3,
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.expect("input_jitter_noise", reader.raw.get("input_jitter_noise"))
        reader.expect("num_experts_per_tok", 2)
        jitter = reader.number("router_jitter_noise", 0.01)
        heads, window = d.read_heads(reader, default_kv_heads=8), reader.optional_positive("sliding_window")
        mlp = d.MoEConfig(
            reader.positive("num_local_experts", 16),
            2,
            reader.positive("intermediate_size", 6400),
            reader.string("hidden_act", "silu"),
            routing_function=_Mixing(jitter),
        )
        return d.uniform_decoder(
            reader,
            d.read_attention(reader, _read_rope(reader), heads, sliding_window=window),
            d.read_layer_norm(reader, "rms_norm_eps"),
            mlp=mlp,
            positions=131072,
            lm_head_bias=reader.boolean("lm_head_bias", False),
        )


@dataclass(frozen=True)
class _Mixing:
    """Makes the router; equal to others with its jitter, in another process too."""

    jitter: float

    def __call__(self) -> SparseMixer:
        return SparseMixer(self.jitter)


def _read_rope(reader: d.ConfigReader) -> d.RopeParameters:
    """The attention factors of LongRoPE are in the file.

    Beyond the original length the long divisors hold, as in the model's own code; transformers 5 keeps the short ones.
    """
    rope = reader.rope(1e6, others=_MSCALES)
    if rope.rope_type not in ("default", "longrope"):
        raise reader.error("rope_type", rope.rope_type, "'default' or 'longrope'")
    if rope.rope_type == "default":
        return rope
    given = d.ConfigReader(reader.raw.get("rope_parameters", reader.raw.get("rope_scaling", {})))
    short, long = (given.positive_number(key) for key in _MSCALES)
    return replace(rope, short_mscale=short, long_mscale=long)
