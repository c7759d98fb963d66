"""gpt-oss: every second layer has a window, heads have sinks, experts clamp what they multiply."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch

from llm.kernels.reference.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from llm.models import decoder as d


def _gate_and_up(last: str) -> d.Cut:
    """One expert's [H, 2I] or [2I], gate and up taking turns."""

    def cut(both: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"gate_proj.{last}", both[..., ::2].t()
        yield f"up_proj.{last}", both[..., 1::2].t()

    return cut


def _down(last: str) -> d.Cut:
    """One expert's [I, H] or [H]."""

    def cut(part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"down_proj.{last}", part.t()

    return cut


def _packed_gate_and_up(last: str) -> d.Cut:
    """As `_gate_and_up`, of one expert's blocks of bytes [2I, groups, bytes], or its scales [2I, groups]."""

    def cut(both: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"gate_proj.{last}", _joined(both[::2])
        yield f"up_proj.{last}", _joined(both[1::2])

    return cut


def _packed_down(last: str) -> d.Cut:
    """As `_down`, of blocks of bytes [H, groups, bytes], or scales [H, groups]."""

    def cut(part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"down_proj.{last}", _joined(part)

    return cut


def _joined(blocks: torch.Tensor) -> torch.Tensor:
    """The blocks of each row side by side."""
    return blocks.flatten(1) if blocks.dim() > 1 else blocks


# What transformers assumes where a file does not say.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssForCausalLM(d.DecoderForCausalLM):
    renames = (("model.layers.*.mlp.router", "model.layers.*.mlp.gate"),)
    stacked_weights: ClassVar[Mapping[str, d.Cut]] = {
        "experts.gate_up_proj": _gate_and_up("weight"),
        "experts.gate_up_proj_bias": _gate_and_up("bias"),
        "experts.down_proj": _down("weight"),
        "experts.down_proj_bias": _down("bias"),
        "experts.gate_up_proj_blocks": _packed_gate_and_up("weight_packed"),
        "experts.gate_up_proj_scales": _packed_gate_and_up("weight_scale"),
        "experts.down_proj_blocks": _packed_down("weight_packed"),
        "experts.down_proj_scales": _packed_down("weight_scale"),
    }

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        d.ignore_training(reader)
        reader.expect("hidden_act", "silu")
        reader.expect("swiglu_alpha", SWIGLUOAI_ALPHA)
        top_k = reader.positive("num_experts_per_tok", 4)
        reader.expect("experts_per_token", top_k)  # its older name
        rope, norm = reader.rope(150_000.0, default_scaling=_YARN), d.read_rms_norm(reader, 1e-5)
        reader.expect("initial_context_length", rope.original_max_position_embeddings)
        heads = d.read_heads(reader, default_kv_heads=8, default_size=64)
        bias = reader.boolean("attention_bias", True)
        experts = d.MoEConfig(
            reader.positive("num_local_experts", 128),
            top_k,
            reader.positive("intermediate_size"),
            "swigluoai",
            bias=True,
            router_bias=True,
            swiglu_limit=reader.positive_number("swiglu_limit", SWIGLUOAI_LIMIT),
        )
        attention = d.AttentionConfig(heads, rope, qkv_bias=bias, out_bias=bias, sinks=True)
        count, window = reader.positive("num_hidden_layers"), reader.optional_positive("sliding_window", 128)
        windows = d.layer_windows(reader, count, window, [index % 2 == 0 for index in range(count)])
        return d.uniform_decoder(reader, d.with_windows(attention, windows), norm, mlp=experts, positions=131072)
