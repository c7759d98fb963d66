"""Recurrent mixers as whole layers, over one prompt, against the recurrence of one channel's states at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llm.forward import ForwardBatch, RecurrentMetadata, RecurrentSpec
from llm.layers.mamba import MambaMixer, MambaMixer2, Plamo2MambaMixer, ShortConv
from llm.loading.loader import process_weights
from op_cases.base import Case, Inputs, normal

HIDDEN, TAPS, STATES = 21, 3, 5
CHANNELS, RANK = 26, 4
HEADS, SIZE, GROUPS = 4, 9, 2


class Whole(nn.Module):
    """The mixer over one prompt, which has a slot of its own."""

    def __init__(self, layer: nn.Module, spec: RecurrentSpec) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        process_weights(self)
        count = len(hidden)
        rows = int(count > 0)
        metadata = RecurrentMetadata(
            slots=torch.ones(rows, dtype=torch.int64),
            query_start_loc=torch.tensor([0, count][: rows + 1], dtype=torch.int32),
            seq_lens=torch.tensor([count][:rows], dtype=torch.int32),
            query_lens_list=[count][:rows],
            seq_lens_list=[count][:rows],
        )
        states = tuple(torch.full((2, *shape), torch.nan) for shape in self.spec.shapes)
        positions = torch.arange(count)
        return self.layer(hidden, ForwardBatch(torch.zeros(count), positions, [metadata], [states], positions))


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ module.quant_method.dequantize_weight(module).double().t()
    return y if module.bias is None else y + module.bias.double()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def convolved(module: Any, x: torch.Tensor) -> torch.Tensor:
    padded = torch.cat((torch.zeros(TAPS - 1, x.shape[1], dtype=x.dtype), x))
    weight, bias = module.weight.double().squeeze(1), 0.0 if module.bias is None else module.bias.double()
    return silu(sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(TAPS)) + bias)


def normed(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight.double()


def recurrence(
    x: torch.Tensor, step: torch.Tensor, rate: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    """x and step [T, channels], rate [channels, states], b and c [T, channels, states], d [channels]."""
    state, out = torch.zeros_like(rate), torch.empty_like(x)
    for token in range(len(x)):
        state = torch.exp(step[token, :, None] * rate) * state + step[token, :, None] * b[token] * x[token, :, None]
        out[token] = (state * c[token]).sum(-1) + d * x[token]
    return out


def mamba(op: Any, hidden: torch.Tensor) -> torch.Tensor:
    layer = op.layer
    x, gate = linear(layer.in_proj, hidden).split(CHANNELS, -1)
    x = convolved(layer.conv1d, x)
    step, b, c = linear(layer.x_proj, x).split([RANK, STATES, STATES], -1)
    if layer.b_layernorm is not None:
        step, b, c = (
            normed(norm, part)
            for norm, part in ((layer.dt_layernorm, step), (layer.b_layernorm, b), (layer.c_layernorm, c))
        )
    step = torch.log1p(torch.exp(linear(layer.dt_proj, step)))
    b, c = (part.unsqueeze(1).expand(-1, CHANNELS, -1) for part in (b, c))
    y = recurrence(x, step, -torch.exp(layer.A_log.double()), b, c, layer.D.double())
    return linear(layer.out_proj, y * silu(gate))


def mamba2(op: Any, hidden: torch.Tensor) -> torch.Tensor:
    layer, width = op.layer, HEADS * SIZE
    shared = GROUPS * STATES
    gate, x, step = linear(layer.in_proj, hidden).split([width, width + 2 * shared, HEADS], -1)
    x, b, c = convolved(layer.conv1d, x).split([width, shared, shared], -1)
    low, high = layer.dt_limit
    step = torch.log1p(torch.exp(step + layer.dt_bias.double())).clamp(low, high).repeat_interleave(SIZE, -1)
    rate = -torch.exp(layer.A_log.double()).repeat_interleave(SIZE)[:, None].expand(-1, STATES)
    b, c = (part.unflatten(-1, (GROUPS, STATES)).repeat_interleave(width // GROUPS, 1) for part in (b, c))
    y = recurrence(x, step, rate, b, c, layer.D.double().repeat_interleave(SIZE))
    if not layer.norm.norm_before_gate:
        y = y * silu(gate)
    if layer.norm.weight is not None:
        runs = y.unflatten(-1, (GROUPS, -1))
        runs = runs / (runs.square().mean(-1, keepdim=True) + layer.norm.variance_epsilon).sqrt()
        y = runs.flatten(-2) * layer.norm.weight.double()
    return linear(layer.out_proj, y * silu(gate) if layer.norm.norm_before_gate else y)


def plamo2_mamba(op: Any, hidden: torch.Tensor) -> torch.Tensor:
    layer, width = op.layer, HEADS * SIZE
    gate, x = linear(layer.in_proj, hidden).split(width, -1)
    x = convolved(layer.conv1d, x)
    b, c, step = linear(layer.bcdt_proj, x).split([STATES, STATES, RANK], -1)
    b, c, step = (normed(norm, part) for norm, part in ((layer.B_norm, b), (layer.C_norm, c), (layer.dt_norm, step)))
    step = torch.log1p(torch.exp(linear(layer.dt_proj, step) + layer.dt_bias.double())).repeat_interleave(SIZE, -1)
    rate = -torch.exp(layer.A_log.double()).repeat_interleave(SIZE)[:, None].expand(-1, STATES)
    b, c = (part.unsqueeze(1).expand(-1, width, -1) for part in (b, c))
    y = recurrence(x, step, rate, b, c, layer.D.double().repeat_interleave(SIZE))
    return linear(layer.out_proj, y * silu(gate))


def short_conv(op: Any, hidden: torch.Tensor) -> torch.Tensor:
    layer = op.layer
    before, after, x = linear(layer.in_proj, hidden).chunk(3, -1)
    padded = torch.cat((torch.zeros(TAPS - 1, HIDDEN, dtype=x.dtype), before * x))
    weight, bias = layer.conv.weight.double().squeeze(1), layer.conv.bias.double()
    y = sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(TAPS)) + bias
    return linear(layer.out_proj, after * y)


def prompt(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return (normal(rows, HIDDEN, dtype=torch.float32, generator=generator),)


def of_mamba(use_norm: bool, bias: bool) -> Callable[[torch.dtype], nn.Module]:
    def build(dtype: torch.dtype) -> nn.Module:
        sizes = (HIDDEN, STATES, TAPS, CHANNELS, RANK, bias, bias, use_norm)
        return Whole(
            MambaMixer(*sizes, layer_index=0, params_dtype=dtype), MambaMixer.state_spec(TAPS, CHANNELS, STATES)
        )

    return build


def of_mamba2(bias: bool, use_norm: bool = True, **more: Any) -> Callable[[torch.dtype], nn.Module]:
    def build(dtype: torch.dtype) -> nn.Module:
        sizes = (HIDDEN, STATES, TAPS, HEADS * SIZE, bias, bias, GROUPS, HEADS, SIZE)
        layer = MambaMixer2(*sizes, use_rms_norm=use_norm, layer_index=0, params_dtype=dtype, **more)
        return Whole(layer, MambaMixer2.state_spec(TAPS, GROUPS, HEADS, SIZE, STATES))

    return build


def of_plamo2(dtype: torch.dtype) -> nn.Module:
    layer = Plamo2MambaMixer(HIDDEN, STATES, TAPS, HEADS, SIZE, RANK, layer_index=0, params_dtype=dtype)
    return Whole(layer, Plamo2MambaMixer.state_spec(TAPS, HEADS, SIZE, STATES))


def of_short_conv(dtype: torch.dtype) -> nn.Module:
    layer = ShortConv(HIDDEN, TAPS, bias=True, layer_index=0, params_dtype=dtype)
    return Whole(layer, RecurrentSpec(((TAPS - 1, HIDDEN),), (torch.float32,)))


def case(build: Callable[[torch.dtype], nn.Module], reference: Callable[..., Any]) -> Case:
    return Case(build, prompt, reference, 2e-5, torch.float32)


MAMBA: dict[str, list[Case]] = {
    "mamba_mixer": [case(of_mamba(True, False), mamba), case(of_mamba(False, True), mamba)],
    "mamba_mixer2": [
        case(of_mamba2(True, dt_limit=(0.6, 1.0)), mamba2),
        case(of_mamba2(False, norm_before_gate=True), mamba2),
        case(of_mamba2(False, use_norm=False), mamba2),
    ],
    "plamo2_mamba_mixer": [case(of_plamo2, plamo2_mamba)],
    "short_conv": [case(of_short_conv, short_conv)],
}
