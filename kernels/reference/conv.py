"""Causal convolution of each channel by itself, with state: the short convolutions of recurrent layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llm.forward import RecurrentMetadata
from llm.kernels.reference.recurrent import state_rows


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    metadata: RecurrentMetadata,
    activation: str | None = None,
) -> torch.Tensor:
    """y[t] = act(bias + sum over k of weight[:, k] * x[t - (K - 1) + k]), within each batch row: -> float32 [T, C].

    Args:
        x: float [T, C], the tokens of all rows; computed in float32, and the result is of its type.
        weight: float [C, K]; bias: float [C].
        conv_state: float32 [slots, C, K - 1], each row's last inputs, the oldest first. Written in place. A row whose
            first token is at position 0 starts from zeros, not from what its slot has.
        activation: "silu" or None.

    Raises:
        IndexError: a row's slot does not exist.
    """
    dtype, x = x.dtype, x.float()
    check_convolution(x, weight, bias, conv_state, activation)
    taps = weight.shape[1]
    out = torch.empty_like(x)
    for row in state_rows(metadata, len(conv_state)):
        kept = conv_state[row.slot]
        inputs = torch.cat([(torch.zeros_like(kept) if row.is_new else kept).t(), x[row.tokens]])
        count = len(inputs) - (taps - 1)
        y = x.new_zeros(x.shape[1]) if bias is None else bias.float()
        for k in range(taps):
            y = y + inputs[k : k + count] * weight[:, k].float()
        conv_state[row.slot] = inputs[row.stored : row.stored + taps - 1].t()
        out[row.tokens] = y if activation is None else F.silu(y)
    return out.to(dtype)


def check_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv_state: torch.Tensor, activation: str | None
) -> None:
    """ValueError for shapes and types that do not fit."""
    if activation not in (None, "silu"):
        raise ValueError(f"a causal convolution has the activations 'silu' and None, got {activation!r}")
    if x.dtype != torch.float32 or x.dim() != 2:
        raise ValueError(f"x is float32 [T, C], got {x.dtype} {list(x.shape)}")
    channels = x.shape[1]
    if weight.dim() != 2 or len(weight) != channels or (bias is not None and bias.shape != (channels,)):
        raise ValueError(f"the weight {list(weight.shape)} and its bias do not fit {channels} channels")
    state = (channels, weight.shape[1] - 1)
    if conv_state.dtype != torch.float32 or conv_state.shape[1:] != state:
        raise ValueError(f"the state is float32 [slots, *{state}], got {conv_state.dtype} {list(conv_state.shape)}")
