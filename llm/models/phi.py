"""Phi 1 to 2: parallel residual, partial rotary embedding, LayerNorm, biases (on the logits too)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm.layers.moe import SparseMixer
from llm.models import decoder as d


class PhiForCausalLM(d.DecoderForCausalLM):
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
        rope, norm = reader.rope(default_share=0.5), d.read_layer_norm(reader)
        attention = d.AttentionConfig(
            d.read_heads(reader),
            rope,
            qkv_bias=True,
            out_bias=True,
            qk_norm=norm if reader.boolean("qk_layernorm", False) else None,
        )
        activation = reader.string("hidden_act", "gelu_new")
        layer = d.LayerConfig(
            attention=attention,
            mlp=d.PlainMLPConfig(reader.positive("intermediate_size"), activation, bias=True),
            norms=d.ParallelNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope), lm_head_bias=True)


class Phi3ForCausalLM(d.DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        # transformers reads the key and never adds a bias.
        reader.expect("attention_bias", False)
        # Keys of Phi-4-mini, at the values without effect.
        reader.expect("mlp_bias", False)
        reader.expect("full_attn_mod", 1)
        reader.expect("interpolate_factor", 1)
        rope, norm = reader.rope(), d.read_rms_norm(reader, 1e-5)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(d.read_heads(reader), rope, reader.optional_integer("sliding_window")),
            mlp=d.GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(reader, layer, norm, positions=d.longest_sequence(reader, rope, 4096))


_MSCALES = ("short_mscale", "long_mscale")


class PhimoeForCausalLM(d.DecoderForCausalLM):
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
        rope, norm = _read_rope(reader), d.read_layer_norm(reader, "rms_norm_eps")
        bias = reader.boolean("attention_bias", False)
        jitter = reader.number("router_jitter_noise", 0.01)
        layer = d.LayerConfig(
            attention=d.AttentionConfig(
                d.read_heads(reader, default_kv_heads=8),
                rope,
                reader.optional_integer("sliding_window"),
                qkv_bias=bias,
                out_bias=bias,
            ),
            mlp=d.MoEConfig(
                reader.positive("num_local_experts", 16),
                2,
                reader.positive("intermediate_size", 6400),
                reader.string("hidden_act", "silu"),
                routing_function=_Mixing(jitter),
            ),
            norms=d.PreNorms(norm),
        )
        return d.read_decoder(
            reader,
            layer,
            norm,
            positions=d.longest_sequence(reader, rope, 131072),
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
