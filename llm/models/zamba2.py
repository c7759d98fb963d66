"""Zamba2: Mamba 2, and before some of its layers one of a few blocks of attention that these layers share."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    DecoderConfig,
    GatedMLPConfig,
    Heads,
    LayerConfig,
    Mamba2Config,
    NormConfig,
    OnePart,
    longest_sequence,
    read_decoder,
    read_rms_norm,
    read_step_limits,
)
from llm.models.decoder.shared_block import SharedBefore, SharedBlockConfig, SharedBlockLayer, SharedBlocksForCausalLM
from llm.models.mamba import TRAINING

# Of transformers' own forward, and what it derives and writes.
_UNUSED = """
    use_mamba_kernels num_logits_to_keep chunk_size use_mem_eff_path hybrid_layer_ids use_conv_bias
    attention_hidden_size attention_head_dim mamba_headdim kv_channels num_query_groups ffn_hidden_size
""".split()
_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_MIXER_EPS = 1e-5  # whatever rms_norm_eps says


class Zamba2ForCausalLM(SharedBlocksForCausalLM):
    renames = (("model.layers.*.mamba_decoder", "model.layers.*"), ("model.final_layernorm", "model.norm"))

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore(*TRAINING, *_UNUSED)
        reader.expect("use_long_context", False)
        norm, mamba, shared = read_rms_norm(reader, 1e-5), _read_mamba(reader), _read_blocks(reader)
        uses = iter(shared)
        layers = [
            SharedBlockLayer(attention=mamba, shared=next(uses), norms=SharedBefore(norm))
            if is_hybrid
            else LayerConfig(attention=mamba, norms=OnePart(norm))
            for is_hybrid in _hybrid_layers(reader)
        ]
        positions = longest_sequence(reader, reader.rope(), 4096)
        return read_decoder(reader, layers, norm, positions=positions, tied=True)


def _hybrid_layers(reader: ConfigReader) -> list[bool]:
    """Which layers use a block; the default is Zamba2-2.7B's."""
    count = reader.positive("num_hidden_layers", 54)
    default = [*range(6, 43, 6), 47, 51]
    kinds = reader.names("layers_block_type") or ["hybrid" if i in default else "mamba" for i in range(count)]
    if len(kinds) != count or not _KINDS.keys() >= set(kinds):
        raise reader.error("layers_block_type", kinds, f"{count} of {', '.join(map(repr, _KINDS))}")
    return [_KINDS[kind] for kind in kinds]


def _read_mamba(reader: ConfigReader) -> Mamba2Config:
    width = reader.positive("mamba_expand", 2) * reader.positive("hidden_size")
    heads = reader.positive("n_mamba_heads", 8)
    if width % heads:
        raise reader.error("n_mamba_heads", heads, f"a divisor of {width} channels")
    groups, states = reader.positive("mamba_ngroups", 1), reader.positive("mamba_d_state", 64)
    kernel, bias = reader.positive("mamba_d_conv", 4), reader.boolean("add_bias_linear", False)
    limits = read_step_limits(reader)
    return Mamba2Config(heads, width // heads, groups, states, kernel, True, bias, _MIXER_EPS, dt_limit=limits)


def _read_blocks(reader: ConfigReader) -> list[SharedBlockConfig]:
    """One for each use, of blocks that take turns."""
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads", 32)
    if 2 * hidden % heads:
        raise reader.error("num_attention_heads", heads, f"a divisor of {2 * hidden} channels")
    sizes = Heads(heads, reader.positive("num_key_value_heads", heads), 2 * hidden // heads)
    inner, activation = reader.positive("intermediate_size", 4 * hidden), reader.string("hidden_act", "gelu")
    mlp = GatedMLPConfig(inner, activation, reader.boolean("add_bias_linear", False))
    norm = NormConfig(reader.positive_number("rms_norm_eps", 1e-5))
    blocks, rank = reader.positive("num_mem_blocks", 1), reader.positive("adapter_rank", 128)
    adapts = reader.boolean("use_shared_attention_adapter", False)
    rope = reader.rope() if reader.boolean("use_mem_rope", False) else None
    return [
        SharedBlockConfig(sizes, mlp, norm, use % blocks, use, rank, adapts, rope)
        for use in range(sum(_hybrid_layers(reader)))
    ]
