"""State-space recurrences: the selective scan of Mamba (arXiv:2312.00752) and that of Mamba 2 (arXiv:2405.21060).

Both run over the tokens of a batch row in order, whatever part of them a step has: the state after a token does not
depend on how the row was split over steps. What the tokens have may be of any float type: it is computed in float32,
and the result is of the type of x.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from llm.forward import RecurrentMetadata
from llm.kernels.reference.recurrent import state_rows

NO_LIMIT = (0.0, math.inf)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
) -> torch.Tensor:
    """Mamba's recurrence, for each of C channels with N states: -> float32 [T, C].

        dt = softplus(dt + dt_bias)
        state[n] = exp(a[n] dt) state[n] + b[n] dt x
        y = (sum over n of c[n] state[n] + d x) * silu(gate)

    Args:
        x, dt, gate: float32 [T, C], the tokens of all rows; no gate: y is not multiplied.
        b, c: float32 [T, N].
        a: float32 [N, C], negative: -exp of a checkpoint's A_log; d, dt_bias: float32 [C].
        state: float32 [slots, N, C], written in place. A row whose first token is at position 0 starts from zeros, not
            from what its slot has.

    Raises:
        IndexError: a row's slot does not exist.
    """
    dtype, gate = x.dtype, None if gate is None else gate.float()
    x, dt, b, c = (item.float() for item in (x, dt, b, c))
    check_selective_scan(x, dt, a, b, c, d, dt_bias, gate, state)
    out = torch.empty_like(x)
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias)
    for row in state_rows(metadata, len(state)):
        current = torch.zeros_like(state[row.slot]) if row.is_new else state[row.slot].clone()
        for seen, token in enumerate(range(row.tokens.start, row.tokens.stop), 1):
            step = dt[token]
            current = torch.exp(a * step) * current + b[token].unsqueeze(1) * (step * x[token])
            out[token] = (c[token].unsqueeze(1) * current).sum(0) + d * x[token]
            if seen == row.stored:
                state[row.slot] = current
    return (out if gate is None else out * F.silu(gate)).to(dtype)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """Mamba 2's recurrence, for each of H heads with P channels and N states: -> float32 [T, H * P].

        dt = clamp(softplus(dt + dt_bias), *dt_limit)
        state[n] = exp(a dt) state[n] + b[n] dt x
        y = sum over n of c[n] state[n] + d x

    Args:
        x: float32 [T, H * P], the tokens of all rows; dt: float32 [T, H].
        b, c: float32 [T, G * N]: consecutive heads share one of G groups.
        a, dt_bias: float32 [H], a negative as in `selective_scan`; d: float32 [H], or [H * P] for one per channel.
        state: float32 [slots, H, N, P], written in place. A row whose first token is at position 0 starts from zeros,
            not from what its slot has.

    Raises:
        IndexError: a row's slot does not exist.
    """
    dtype = x.dtype
    x, dt, b, c = (item.float() for item in (x, dt, b, c))
    check_mamba2_scan(x, dt, a, b, c, d, dt_bias, state)
    _, heads, states, channels = state.shape
    out = x.new_empty(len(x), heads, channels)
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias).clamp(*dt_limit)
    b, c = (part.unflatten(1, (-1, states)).repeat_interleave(heads * states // part.shape[1], 1) for part in (b, c))
    x, d = x.unflatten(1, (heads, channels)), d.view(heads, -1)
    for row in state_rows(metadata, len(state)):
        current = torch.zeros_like(state[row.slot]) if row.is_new else state[row.slot].clone()
        for seen, token in enumerate(range(row.tokens.start, row.tokens.stop), 1):
            step = dt[token]
            added = b[token].unsqueeze(2) * (step.unsqueeze(1) * x[token]).unsqueeze(1)
            current = torch.exp(a * step).view(-1, 1, 1) * current + added
            out[token] = (c[token].unsqueeze(2) * current).sum(1) + d * x[token]
            if seen == row.stored:
                state[row.slot] = current
    return out.flatten(1).to(dtype)


def check_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    state: torch.Tensor,
) -> None:
    """ValueError for shapes and types that do not fit."""
    tokens, channels, states = len(x), x.shape[-1], b.shape[-1]
    _check("x", x, (tokens, channels))
    _check("dt", dt, (tokens, channels))
    _check("a", a, (states, channels))
    _check("b", b, (tokens, states))
    _check("c", c, (tokens, states))
    _check("d", d, (channels,))
    _check("dt_bias", dt_bias, (channels,))
    _check("gate", gate, (tokens, channels))
    _check("state", state, (len(state), states, channels))


def check_mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
) -> None:
    """ValueError for shapes and types that do not fit."""
    if state.dim() != 4:
        raise ValueError(f"state is float32 [slots, H, N, P], got {list(state.shape)}")
    tokens, (slots, heads, states, channels) = len(x), state.shape
    groups = b.shape[-1] // states
    if not groups or heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups of b {list(b.shape)} of {states} states")
    _check("x", x, (tokens, heads * channels))
    _check("dt", dt, (tokens, heads))
    _check("a", a, (heads,))
    _check("b", b, (tokens, groups * states))
    _check("c", c, (tokens, groups * states))
    _check("d", d, (heads,) if len(d) == heads else (heads * channels,))
    _check("dt_bias", dt_bias, (heads,))
    _check("state", state, (slots, heads, states, channels))


def _check(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and (tensor.dtype != torch.float32 or tensor.shape != shape):
        raise ValueError(f"{name} is float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
