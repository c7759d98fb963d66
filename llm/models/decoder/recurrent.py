"""Recurrent mixers in the place of attention: Mamba, Mamba 2, short convolutions and the gated delta rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from llm.errors import UnsupportedModelError
from llm.forward import RecurrentSpec
from llm.kernels.reference.recurrent import NO_LIMIT
from llm.layers.linear_attention import (
    DeltaHeads,
    GatedDeltaNetAttention,
    KimiGatedDeltaNetAttention,
    OlmoHybridGatedDeltaNetAttention,
    QwenGatedDeltaNetAttention,
    QwenNextGatedDeltaNetAttention,
)
from llm.layers.mamba import MambaMixer, MambaMixer2, Plamo2MambaMixer, ShortConv
from llm.layers.parallel import TensorParallel
from llm.models.config_reader import ConfigReader
from llm.models.decoder.part import BuildContext, PartConfig


@dataclass(frozen=True)
class MambaConfig(PartConfig):
    """Mamba; the fields are the arguments of `MambaMixer`.

    Attributes:
        norm_eps: of norms of steps, B and C; None: there are none.
        norm_has_weight: these norms have a weight.
    """

    module_name = "mamba"

    state_size: int
    conv_kernel: int
    intermediate_size: int
    time_step_rank: int
    conv_bias: bool
    bias: bool
    norm_eps: float | None = None
    norm_has_weight: bool = True

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return MambaMixer(
            context.hidden_size,
            self.state_size,
            self.conv_kernel,
            self.intermediate_size,
            self.time_step_rank,
            self.conv_bias,
            self.bias,
            self.norm_eps is not None,
            self.norm_has_weight,
            self.norm_eps or 0.0,
            layer_index=context.next_state(),
            params_dtype=context.options.params_dtype,
            quant_config=context.options.quant_config,
            prefix=prefix,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        return (MambaMixer.state_spec(self.conv_kernel, self.intermediate_size, self.state_size),)


@dataclass(frozen=True)
class Mamba2Config(PartConfig):
    """Mamba 2; the fields are the arguments of `MambaMixer2`.

    Attributes:
        heads, head_size: of the recurrence.
        groups: consecutive heads share one of so many B and C.
        norm_eps: of the gated norm; None: there is the gate alone.
        dt_limit: between which steps are clamped.
        multipliers: constants, as in `MambaMixer2`.
    """

    module_name = "mamba"

    heads: int
    head_size: int
    groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool
    bias: bool
    norm_eps: float | None
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = NO_LIMIT
    multipliers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise UnsupportedModelError(
                f"config.json: {self.heads} heads of the recurrence cannot share {self.groups} groups of states."
            )

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return MambaMixer2(
            context.hidden_size,
            self.state_size,
            self.conv_kernel,
            self.heads * self.head_size,
            self.conv_bias,
            self.bias,
            self.groups,
            self.heads,
            self.head_size,
            self.norm_eps or 0.0,
            self.norm_eps is not None,
            layer_index=context.next_state(),
            norm_before_gate=self.norm_before_gate,
            dt_limit=self.dt_limit,
            multipliers=self.multipliers,
            params_dtype=context.options.params_dtype,
            quant_config=context.options.quant_config,
            prefix=prefix,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        return (MambaMixer2.state_spec(self.conv_kernel, self.groups, self.heads, self.head_size, self.state_size),)


@dataclass(frozen=True)
class Plamo2MambaConfig(PartConfig):
    """PLaMo 2's mixer; the fields are the arguments of `Plamo2MambaMixer`."""

    heads: int
    head_size: int
    state_size: int
    conv_kernel: int
    time_step_rank: int
    norm_eps: float

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return Plamo2MambaMixer(
            context.hidden_size,
            self.state_size,
            self.conv_kernel,
            self.heads,
            self.head_size,
            self.time_step_rank,
            self.norm_eps,
            layer_index=context.next_state(),
            params_dtype=context.options.params_dtype,
            quant_config=context.options.quant_config,
            prefix=prefix,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        return (Plamo2MambaMixer.state_spec(self.conv_kernel, self.heads, self.head_size, self.state_size),)


def read_mamba2(
    reader: ConfigReader,
    norm_eps: float | None,
    *,
    width: int | None = None,
    norm_before_gate: bool = False,
    multipliers: tuple[float, ...] | None = None,
) -> Mamba2Config:
    """From the keys that hybrids share; a missing one stands for what it does in all of them.

    Args:
        width: channels of the recurrence; None: `mamba_expand` times those of the hidden state.
        norm_eps, norm_before_gate, multipliers: as in `Mamba2Config`.
    """
    read_activation(reader)
    expand, hidden = reader.positive("mamba_expand", 2), reader.positive("hidden_size")
    width = expand * hidden if width is None else width
    heads = reader.positive("mamba_n_heads", 128)
    if reader.raw.get("mamba_d_head", "auto") == "auto":
        reader.expect("mamba_d_head", "auto")
        size = width // heads
    else:
        size = reader.positive("mamba_d_head")
    if heads * size != width:
        raise reader.error("mamba_n_heads", heads, f"of heads of {size} with {width} channels together")
    reader.ignore("mamba_chunk_size")  # of another form of the recurrence
    return Mamba2Config(
        heads,
        size,
        reader.positive("mamba_n_groups", 1),
        reader.positive("mamba_d_state", 256),
        reader.positive("mamba_d_conv", 4),
        reader.boolean("mamba_conv_bias", True),
        reader.boolean("mamba_proj_bias", False),
        norm_eps,
        norm_before_gate=norm_before_gate,
        dt_limit=read_step_limits(reader),
        multipliers=multipliers,
    )


def read_mixers(reader: ConfigReader) -> list[bool]:
    """Which layers have attention, from `layer_types`; the others have a recurrent mixer."""
    count = reader.positive("num_hidden_layers")
    kinds = reader.names("layer_types") or ["linear_attention"] * count
    known = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}
    if len(kinds) != count or not known.keys() >= set(kinds):
        raise reader.error("layer_types", kinds, f"{count} of {', '.join(map(repr, known))}")
    return [known[kind] for kind in kinds]


def read_step_limits(reader: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`: two numbers, of which the second may be infinite; without it steps are not clamped."""
    key = "time_step_limit"
    value = reader.raw.get(key, list(NO_LIMIT))
    reader.expect(key, value)
    # transformers 5 writes infinity as an object.
    items = value if isinstance(value, list | tuple) else []
    limits = [math.inf if item == {"__float__": "Infinity"} else item for item in items]
    are_numbers = len(limits) == 2 and all(isinstance(item, int | float) for item in limits)
    if not are_numbers or not 0 <= limits[0] <= limits[1]:
        raise reader.error(key, value, "two numbers from 0 up, the first not above the second")
    return float(limits[0]), float(limits[1])


def read_activation(reader: ConfigReader, key: str = "hidden_act") -> None:
    """That of the convolution, which has one."""
    reader.expect(key, "silu", "swish")


@dataclass(frozen=True)
class ShortConvConfig(PartConfig):
    """A gated convolution over the last `kernel_size` tokens; as many channels as the hidden state."""

    channels: int
    kernel_size: int
    bias: bool = False

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return ShortConv(
            self.channels,
            self.kernel_size,
            bias=self.bias,
            layer_index=context.next_state(),
            prefix=prefix,
            **context.common,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        return (RecurrentSpec(((self.kernel_size - 1, self.channels // tp.size),), (torch.float32,), rolls_back=True),)


_DELTA_NETS: dict[str, type[GatedDeltaNetAttention]] = {
    "qwen": QwenGatedDeltaNetAttention,
    "qwen_next": QwenNextGatedDeltaNetAttention,
    "olmo_hybrid": OlmoHybridGatedDeltaNetAttention,
    "kimi": KimiGatedDeltaNetAttention,
}


@dataclass(frozen=True)
class GatedDeltaConfig(PartConfig):
    """Linear attention by the gated delta rule.

    Attributes:
        kind: whose projections: "qwen", "qwen_next", "olmo_hybrid" or "kimi".
        eps: of the norm of a head's output.
        beta_scale: 2 allows negative eigenvalues.
        activation: of the output's gate, "silu" or "sigmoid".
    """

    kind: str
    heads: DeltaHeads
    kernel_size: int
    eps: float
    beta_scale: float = 1.0
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.heads.heads % self.heads.key_heads:
            raise UnsupportedModelError(
                f"config.json: linear_num_value_heads {self.heads.heads} is not a multiple of linear_num_key_heads "
                f"{self.heads.key_heads}."
            )

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return _DELTA_NETS[self.kind](
            context.hidden_size,
            self.heads,
            self.kernel_size,
            self.eps,
            layer_index=context.next_state(),
            beta_scale=self.beta_scale,
            activation=self.activation,
            prefix=prefix,
            **context.common,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        heads = self.heads
        window = self.kernel_size - 1, (2 * heads.keys + heads.values) // tp.size
        matrices = heads.heads // tp.size, heads.key_size, heads.value_size
        return (RecurrentSpec((window, matrices), (torch.float32, torch.float32), rolls_back=True),)


def attending_layers(reader: ConfigReader, count: int, default: list[bool] | None = None) -> list[bool]:
    """Which layers have full attention: by `layer_types`, or `default`, or every `full_attention_interval`-th."""
    every = reader.positive("full_attention_interval", 4)
    kinds = reader.names("layer_types")
    if kinds is None:
        return default or [(index + 1) % every == 0 for index in range(count)]
    if len(kinds) != count or set(kinds) - {"full_attention", "linear_attention"}:
        raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'linear_attention'")
    return [kind == "full_attention" for kind in kinds]
