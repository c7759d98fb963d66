"""LFM2, with and without experts."""

from typing import ClassVar

from llm.models import decoder as d

_LAYER = "model.layers.*"
# The checkpoints of transformers 4 have keys that its code never read.
_NEVER_READ = """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc""".split()


class Lfm2ForCausalLM(d.DecoderForCausalLM):
    """LFM2: short convolutions, and attention in some layers; queries and keys are normalised per head."""

    renames: ClassVar[d.Renames] = (
        (f"{_LAYER}.conv", f"{_LAYER}.self_attn"),
        (f"{_LAYER}.self_attn.out_proj", f"{_LAYER}.self_attn.o_proj"),
        (f"{_LAYER}.self_attn.q_layernorm", f"{_LAYER}.self_attn.q_norm"),
        (f"{_LAYER}.self_attn.k_layernorm", f"{_LAYER}.self_attn.k_norm"),
        (f"{_LAYER}.operator_norm", f"{_LAYER}.input_layernorm"),
        (f"{_LAYER}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
        (f"{_LAYER}.feed_forward.w1", f"{_LAYER}.mlp.gate_proj"),
        (f"{_LAYER}.feed_forward.w2", f"{_LAYER}.mlp.down_proj"),
        (f"{_LAYER}.feed_forward.w3", f"{_LAYER}.mlp.up_proj"),
        ("model.embedding_norm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        return _decoder(reader, [d.GatedMLPConfig(_inner_size(reader), "silu")] * reader.positive("num_hidden_layers"))


def _decoder(reader: d.ConfigReader, mlps: list[d.PartConfig]) -> d.DecoderConfig:
    """A decoder with these feed-forwards, one per layer."""
    for key in _NEVER_READ:
        reader.expect(key, reader.raw.get(key))
    rope, norm = reader.rope(1e6), d.NormConfig(reader.positive_number("norm_eps", 1e-5))
    attention = d.AttentionConfig(d.read_heads(reader, default_kv_heads=8), rope, qk_norm=norm)
    bias = reader.boolean("conv_bias", False)
    conv = d.ShortConvConfig(reader.positive("hidden_size"), reader.positive("conv_L_cache", 3), bias)
    mixers = [conv if is_conv else attention for is_conv in _convolutions(reader, len(mlps))]
    tied = reader.boolean("tie_embedding", True)
    return d.uniform_decoder(reader, mixers, norm, mlp=mlps, rope=rope, positions=128_000, tied=tied)


def _convolutions(reader: d.ConfigReader, count: int) -> list[bool]:
    """Which layers are convolutions: by `layer_types`, or all but those of `full_attn_idxs`."""
    attention = reader.integers("full_attn_idxs")
    kinds = reader.names("layer_types")
    if kinds is None:
        attending = range(count) if attention is None else attention
        return [index not in attending for index in range(count)]
    if len(kinds) != count or set(kinds) - {"full_attention", "conv"}:
        raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'conv'")
    return [kind == "conv" for kind in kinds]


def _inner_size(reader: d.ConfigReader) -> int:
    """Channels of the feed-forward: two thirds of the number in the file, rounded up, unless it says otherwise."""
    size = reader.positive("block_ff_dim", reader.positive("intermediate_size", 12288))
    multiple = reader.positive("block_multiple_of", 256)
    factor = reader.positive_number("block_ffn_dim_multiplier", 1.0)
    if not reader.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(factor * int(2 * size / 3))
    return multiple * -(-size // multiple)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts: the first layers have a feed-forward, the others experts chosen by sigmoid scores."""

    renames = (
        (f"{_LAYER}.feed_forward.experts.*.w1", f"{_LAYER}.mlp.experts.*.gate_proj"),
        (f"{_LAYER}.feed_forward.experts.*.w2", f"{_LAYER}.mlp.experts.*.down_proj"),
        (f"{_LAYER}.feed_forward.experts.*.w3", f"{_LAYER}.mlp.experts.*.up_proj"),
        (f"{_LAYER}.feed_forward.expert_bias", f"{_LAYER}.mlp.gate.e_score_correction_bias"),
        *Lfm2ForCausalLM.renames,
        (f"{_LAYER}.feed_forward", f"{_LAYER}.mlp"),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        dense: d.PartConfig = d.GatedMLPConfig(reader.positive("intermediate_size", 7168), "silu")
        sparse = d.MoEConfig(
            reader.positive("num_experts", 32),
            reader.positive("num_experts_per_tok", 4),
            reader.positive("moe_intermediate_size", 1792),
            "silu",
            renormalize=reader.boolean("norm_topk_prob", True),
            scoring="sigmoid",
            correction_bias=reader.boolean("use_expert_bias", True),
            routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
        )
        first = reader.count("num_dense_layers", 2)
        count = reader.positive("num_hidden_layers")
        return _decoder(reader, [dense if index < first else sparse for index in range(count)])
