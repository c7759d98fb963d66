"""Operations that keep a state per request, in plain PyTorch: causal convolutions of each channel by itself, the gated
delta rule (arXiv:2412.06464), and the scans of Mamba (arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).

All run over the tokens of a batch row in order, whatever part of them a step has: the state after a token does not
depend on how the row was split over steps. What the tokens have may be of any float type: it is computed in float32,
and the result is of that type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llm.forward import RecurrentMetadata

NO_LIMIT = (0.0, math.inf)


@dataclass(frozen=True)
class StateRow:
    """A batch row that has tokens in this step.

    Attributes:
        tokens: its tokens among the step's.
        stored: how many of them the stored state has seen.
        is_new: the first of them is at position 0.
    """

    slot: int
    tokens: slice
    stored: int
    is_new: bool


def state_rows(metadata: RecurrentMetadata, num_slots: int) -> Iterator[StateRow]:
    """IndexError: no such slot."""
    host = metadata.on_host()
    starts, lengths = host.starts, host.lengths
    ends = starts[1:]
    if host.counts is not None:
        ends = [start + count for start, count in zip(starts, host.counts, strict=False)]
    counts = [end - start for start, end in zip(starts, ends, strict=False)]
    stored = counts if host.stored is None else host.stored
    for row, slot in enumerate(host.slots):
        if not 0 <= slot < num_slots:
            raise IndexError(f"slot {slot} does not exist: there are {num_slots}")
        if counts[row]:
            yield StateRow(slot, slice(starts[row], ends[row]), stored[row], lengths[row] == counts[row])


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


_NORM_EPS = 1e-6


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    metadata: RecurrentMetadata,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """For each token in order, with S the state [K, V] of a head: -> float32 [T, heads, V].

        S = e^(a softplus(decay + dt_bias)) S
        S = S + k^T (v - k S) sigmoid(beta) beta_scale
        y = q S

    k and q are divided by sqrt(sum of squares + 1e-6), and q by sqrt(K). Other types of what the tokens have are
    computed in float32, and the result is of the type of `value`.

    Args:
        query, key: float32 [T, key heads, K]; each is for heads / key heads consecutive heads.
        value: float32 [T, heads, V].
        decay: float32 [T, heads], or [T, heads, K]: of each row of the state by itself (arXiv:2510.26692).
        beta: float32 [T, heads], before the sigmoid.
        a: float32 [heads], -exp of a checkpoint's A_log; dt_bias: float32, of the shape of one token's `decay`.
        state: float32 [slots, heads, K, V], written in place. A row whose first token is at position 0 starts from
            zeros, not from what its slot has.

    Raises:
        IndexError: a row's slot does not exist.
    """
    dtype = value.dtype
    query, key, value, decay, beta = (item.float() for item in (query, key, value, decay, beta))
    check_delta_rule(query, key, value, decay, beta, a, dt_bias, state)
    repeats, size = value.shape[1] // key.shape[1], key.shape[2]
    kept = (a.view(-1, *[1] * (decay.dim() - 2)) * F.softplus(decay + dt_bias)).exp()
    kept = kept[..., None, None] if decay.dim() == 2 else kept[..., None]
    share = beta.sigmoid()[..., None] * beta_scale
    out = torch.empty_like(value)
    for row in state_rows(metadata, len(state)):
        now = torch.zeros_like(state[row.slot]) if row.is_new else state[row.slot].clone()
        for seen, t in enumerate(range(row.tokens.start, row.tokens.stop), 1):
            # One token at a time: the order of a sum on a device may depend on how many there are.
            q, k = (_normalised(item[t]).repeat_interleave(repeats, dim=0)[..., None] for item in (query, key))
            now = now * kept[t]
            known = (now * k).sum(-2)
            now = now + k * ((value[t] - known) * share[t])[:, None]
            out[t] = (now * (q * size**-0.5)).sum(-2)
            if seen == row.stored:
                state[row.slot] = now
    return out.to(dtype)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def check_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """ValueError for shapes and types that do not fit."""
    tensors = (query, key, value, decay, beta, a, dt_bias, state)
    if any(item.dtype != torch.float32 for item in tensors):
        raise ValueError(f"the gated delta rule takes float32, got {[str(item.dtype) for item in tensors]}")
    if query.shape != key.shape or key.dim() != 3 or value.dim() != 3 or len(value) != len(key):
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit")
    (tokens, key_heads, size), heads = key.shape, value.shape[1]
    if heads % key_heads or state.shape[1:] != (heads, size, value.shape[2]):
        raise ValueError(f"the state {list(state.shape)} does not fit {key_heads} key heads and {heads} heads")
    if decay.shape not in ((tokens, heads), (tokens, heads, size)) or dt_bias.shape != decay.shape[1:]:
        raise ValueError(f"decay {list(decay.shape)} and dt_bias {list(dt_bias.shape)} do not fit {heads} heads")
    if beta.shape != (tokens, heads) or a.shape != (heads,):
        raise ValueError(f"beta {list(beta.shape)} and a {list(a.shape)} do not fit {heads} heads")


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
