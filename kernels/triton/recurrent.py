"""Operations that keep a state per request, as `kernels/reference/recurrent.py` defines them.

A program takes a batch row and a part of the state that depends on no other part, keeps it in registers, and goes
through the row's tokens in order. So a row's bits depend neither on the other rows nor on how its tokens were split
over steps. The host reads no number of the rows.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from llm.forward import RecurrentMetadata
from llm.kernels.reference.recurrent import NO_LIMIT
from llm.kernels.triton.language import rounded, sigmoid, softplus
from llm.kernels.triton.launch import launch, power_of_two, side_by_side

# Tokens of a program of the convolution, at least, and tokens times channels.
_TOKENS, _PLACES = 16, 2048
# Columns of a state that a program keeps; all of its rows.
_COLUMNS = 32
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _row(slots, starts, lengths, counts, stored, row):
    """(slot, first token, tokens, how many of them the stored state sees, 1 if the row had tokens before, else 0)."""
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first if counts is None else tl.load(counts + row)
    seen = count if stored is None else tl.load(stored + row)
    return tl.load(slots + row), first.to(tl.int64), count, seen, tl.where(tl.load(lengths + row) != count, 1, 0)


@triton.jit
def convolve(x, weight, bias, state, y, slots, starts, lengths, counts, stored, C, stride_x, w_c, w_k, s_s, s_c, s_k,
             TAPS: tl.constexpr, IS_SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """BT tokens of a row. The program of its first ones also stores the last inputs: it alone has read the old ones."""
    slot, first, count, seen, kept = _row(slots, starts, lengths, counts, stored, tl.program_id(0))
    part = tl.program_id(1)
    if part * BT >= count:
        return
    rc = tl.program_id(2) * BC + tl.arange(0, BC)
    is_channel = rc < C
    rt = part * BT + tl.arange(0, BT)
    old = state + slot * s_s + rc[None, :] * s_c
    inside = (rt < count)[:, None] & is_channel[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    if bias is not None:
        total += tl.load(bias + rc, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in range(TAPS):
        # Inputs are numbered from the oldest that is kept: input TAPS - 1 is the row's first token of this step.
        at = rt + tap
        is_old = (at < TAPS - 1)[:, None] & inside
        token = first + at - (TAPS - 1)
        value = tl.load(x + token[:, None] * stride_x + rc[None, :], mask=inside & (at >= TAPS - 1)[:, None], other=0.0)
        value = value.to(tl.float32)
        if TAPS > 1:
            before = tl.load(old + at[:, None] * s_k, mask=inside & (at < (TAPS - 1) * kept)[:, None], other=0.0)
            value = tl.where(is_old, before, value)
        factor = tl.load(weight + rc * w_c + tap * w_k, mask=is_channel, other=0.0).to(tl.float32)
        total = total + value * factor[None, :]
    if IS_SILU:
        total = total * sigmoid(total)
    out = y + (first + rt)[:, None] * C + rc[None, :]
    tl.store(out, rounded(total, y.dtype.element_ty), mask=inside)
    if part == 0:
        # All of the program have read the old inputs.
        tl.debug_barrier()
        _store_inputs(x, state + slot * s_s + rc * s_c, first, seen, kept, rc, C, stride_x, s_k, TAPS)


@triton.jit
def _store_inputs(x, row, first, seen, kept, rc, C, stride_x, s_k, TAPS: tl.constexpr):
    """The last inputs up to token `seen`, oldest first: a place is written after what goes into those before it."""
    for place in tl.static_range(TAPS - 1):
        at = seen + place
        is_new = rc < tl.where(at >= TAPS - 1, C, 0)
        value = tl.load(x + (first + at - (TAPS - 1)) * stride_x + rc, mask=is_new, other=0.0).to(tl.float32)
        before = tl.load(row + at * s_k, mask=rc < tl.where(at < (TAPS - 1) * kept, C, 0), other=0.0)
        tl.store(row + place * s_k, tl.where(is_new, value, before), mask=rc < C)


@triton.jit
def delta_rule(query, key, value, decay, beta, a, dt_bias, state, y, slots, starts, lengths, counts, stored, heads, K,
               V, repeats, q_t, k_t, v_t, d_t, b_t, q_h, k_h, v_h, d_h, beta_scale, q_scale, PER_ROW: tl.constexpr,
               BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Columns of the state [K, V] of a head. PER_ROW: each of its rows decays by itself."""
    slot, first, count, seen, kept = _row(slots, starts, lengths, counts, stored, tl.program_id(0))
    head = tl.program_id(1)
    rk = tl.arange(0, BK)
    rv = tl.program_id(2) * BV + tl.arange(0, BV)
    is_k = rk < K
    is_v = rv < V
    inside = is_k[:, None] & is_v[None, :]
    at = state + (slot * heads + head) * K * V + rk[:, None] * V + rv[None, :]
    now = tl.load(at, mask=inside & (rk < K * kept)[:, None], other=0.0)
    factor = tl.load(a + head).to(tl.float32)
    if PER_ROW:
        shift = tl.load(dt_bias + head * K + rk, mask=is_k, other=0.0).to(tl.float32)
    else:
        shift = tl.load(dt_bias + head).to(tl.float32)
    for token in range(count):
        t = first + token
        k = tl.load(key + t * k_t + (head // repeats) * k_h + rk, mask=is_k, other=0.0).to(tl.float32)
        q = tl.load(query + t * q_t + (head // repeats) * q_h + rk, mask=is_k, other=0.0).to(tl.float32)
        k = k * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(k * k, 0) + _NORM_EPS))
        q = q * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(q * q, 0) + _NORM_EPS)) * q_scale
        if PER_ROW:
            step = tl.load(decay + t * d_t + head * d_h + rk, mask=is_k, other=0.0).to(tl.float32)
            now = now * tl.exp(factor * softplus(step + shift))[:, None]
        else:
            step = tl.load(decay + t * d_t + head * d_h).to(tl.float32)
            now = now * tl.exp(factor * softplus(step + shift))
        v = tl.load(value + t * v_t + head * v_h + rv, mask=is_v, other=0.0).to(tl.float32)
        share = sigmoid(tl.load(beta + t * b_t + head).to(tl.float32)) * beta_scale
        known = tl.sum(now * k[:, None], 0)
        now = now + k[:, None] * ((v - known) * share)[None, :]
        total = tl.sum(now * q[:, None], 0)
        tl.store(y + (t * heads + head) * V + rv, rounded(total, y.dtype.element_ty), mask=is_v)
        if token + 1 == seen:
            tl.store(at, now, mask=inside)


@triton.jit
def scan_channels(x, dt, a, b, c, d, dt_bias, gate, state, y, slots, starts, lengths, counts, stored, C, N, x_t, dt_t,
                  b_t, c_t, g_t, BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Channels with N states each."""
    slot, first, count, seen, kept = _row(slots, starts, lengths, counts, stored, tl.program_id(0))
    rn = tl.arange(0, BN)
    rc = tl.program_id(1) * BC + tl.arange(0, BC)
    is_n = rn < N
    is_c = rc < C
    inside = is_n[:, None] & is_c[None, :]
    at = state + slot * N * C + rn[:, None] * C + rc[None, :]
    now = tl.load(at, mask=inside & (rn < N * kept)[:, None], other=0.0)
    rate = tl.load(a + rn[:, None] * C + rc[None, :], mask=inside, other=0.0).to(tl.float32)
    skip = tl.load(d + rc, mask=is_c, other=0.0).to(tl.float32)
    for token in range(count):
        t = first + token
        step = tl.load(dt + t * dt_t + rc, mask=is_c, other=0.0).to(tl.float32)
        if dt_bias is not None:
            step = step + tl.load(dt_bias + rc, mask=is_c, other=0.0).to(tl.float32)
        step = softplus(step)
        own = tl.load(x + t * x_t + rc, mask=is_c, other=0.0).to(tl.float32)
        into = tl.load(b + t * b_t + rn, mask=is_n, other=0.0).to(tl.float32)
        out = tl.load(c + t * c_t + rn, mask=is_n, other=0.0).to(tl.float32)
        now = tl.exp(rate * step[None, :]) * now + into[:, None] * (step * own)[None, :]
        total = tl.sum(out[:, None] * now, 0) + skip * own
        if gate is not None:
            factor = tl.load(gate + t * g_t + rc, mask=is_c, other=0.0).to(tl.float32)
            total = total * (factor * sigmoid(factor))
        tl.store(y + t * C + rc, rounded(total, y.dtype.element_ty), mask=is_c)
        if token + 1 == seen:
            tl.store(at, now, mask=inside)


@triton.jit
def scan_heads(x, dt, a, b, c, d, dt_bias, state, y, slots, starts, lengths, counts, stored, heads, P, N, per_group,
               x_t, dt_t, b_t, c_t, least, most, D_PER_CHANNEL: tl.constexpr, BN: tl.constexpr,
               BP: tl.constexpr):  # fmt: skip
    """Channels of a head, with N states each."""
    slot, first, count, seen, kept = _row(slots, starts, lengths, counts, stored, tl.program_id(0))
    head = tl.program_id(1)
    group = head // per_group
    rn = tl.arange(0, BN)
    rp = tl.program_id(2) * BP + tl.arange(0, BP)
    is_n = rn < N
    is_p = rp < P
    inside = is_n[:, None] & is_p[None, :]
    at = state + (slot * heads + head) * N * P + rn[:, None] * P + rp[None, :]
    now = tl.load(at, mask=inside & (rn < N * kept)[:, None], other=0.0)
    rate = tl.load(a + head).to(tl.float32)
    if D_PER_CHANNEL:
        skip = tl.load(d + head * P + rp, mask=is_p, other=0.0).to(tl.float32)
    else:
        skip = tl.load(d + head).to(tl.float32)
    for token in range(count):
        t = first + token
        step = tl.load(dt + t * dt_t + head).to(tl.float32)
        if dt_bias is not None:
            step = step + tl.load(dt_bias + head).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step), least), most)
        own = tl.load(x + t * x_t + head * P + rp, mask=is_p, other=0.0).to(tl.float32)
        into = tl.load(b + t * b_t + group * N + rn, mask=is_n, other=0.0).to(tl.float32)
        out = tl.load(c + t * c_t + group * N + rn, mask=is_n, other=0.0).to(tl.float32)
        now = tl.exp(rate * step) * now + into[:, None] * (step * own)[None, :]
        total = tl.sum(out[:, None] * now, 0) + skip * own
        tl.store(y + (t * heads + head) * P + rp, rounded(total, y.dtype.element_ty), mask=is_p)
        if token + 1 == seen:
            tl.store(at, now, mask=inside)


# --- The operations. ---


def _of_rows(metadata: RecurrentMetadata, slots: int) -> tuple[torch.Tensor | None, ...]:
    """What `_row` reads. IndexError: a slot does not exist, where the host knows the numbers."""
    if metadata.host is not None and (bad := [slot for slot in metadata.host.slots if not 0 <= slot < slots]):
        raise IndexError(f"slot {bad[0]} does not exist: there are {slots}")
    return metadata.slots, metadata.query_start_loc, metadata.seq_lens, metadata.counts, metadata.stored


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    metadata: RecurrentMetadata,
    activation: str | None = None,
) -> torch.Tensor:
    """See `kernels/reference/recurrent.py`."""
    x, (channels, taps) = side_by_side(x), weight.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = power_of_two(taps - 1, _TOKENS)  # the inputs of other tokens than the first so many are no old ones
    parts = -(-max(metadata.query_lens_list, default=0) // tokens)
    launch(
        convolve, (len(metadata.slots), parts, -(-channels // (_PLACES // tokens))), x, weight, bias, conv_state, y,
        *_of_rows(metadata, len(conv_state)), channels, x.stride(0), *weight.stride(), *conv_state.stride(), TAPS=taps,
        IS_SILU=activation == "silu", BT=tokens, BC=_PLACES // tokens, device=x.device, num_warps=4,
    )  # fmt: skip
    return y


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
    """See `kernels/reference/recurrent.py`."""
    query, key, value, beta, decay = (side_by_side(item) for item in (query, key, value, beta, decay))
    (_, key_heads, size), (_, heads, width) = key.shape, value.shape
    y = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    launch(
        delta_rule, (len(metadata.slots), heads, -(-width // _COLUMNS)), query, key, value, decay, beta, a,
        dt_bias.contiguous(), state, y, *_of_rows(metadata, len(state)), heads, size, width, heads // key_heads,
        query.stride(0), key.stride(0), value.stride(0), decay.stride(0), beta.stride(0), query.stride(1),
        key.stride(1), value.stride(1), decay.stride(1), float(beta_scale), size**-0.5, PER_ROW=decay.dim() == 3,
        BK=power_of_two(size), BV=_COLUMNS, device=value.device, num_warps=4,
    )  # fmt: skip
    return y


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
    """See `kernels/reference/recurrent.py`."""
    x, dt, b, c = (side_by_side(item) for item in (x, dt, b, c))
    gate = None if gate is None else side_by_side(gate)
    channels, states = x.shape[1], b.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # A state has few rows here.
    columns = max(_COLUMNS, 2048 // power_of_two(states))
    launch(
        scan_channels, (len(metadata.slots), -(-channels // columns)), x, dt, a.contiguous(), b, c, d, dt_bias, gate,
        state, y, *_of_rows(metadata, len(state)), channels, states, x.stride(0), dt.stride(0), b.stride(0),
        c.stride(0), 0 if gate is None else gate.stride(0), BN=power_of_two(states),
        BC=columns, device=x.device, num_warps=4,
    )  # fmt: skip
    return y


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
    """See `kernels/reference/recurrent.py`."""
    x, dt, b, c = (side_by_side(item) for item in (x, dt, b, c))
    _, heads, states, channels = state.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        scan_heads, (len(metadata.slots), heads, -(-channels // _COLUMNS)), x, dt, a, b, c, d, dt_bias, state, y,
        *_of_rows(metadata, len(state)), heads, channels, states, heads * states // b.shape[1], x.stride(0),
        dt.stride(0), b.stride(0), c.stride(0), float(dt_limit[0]), float(dt_limit[1]), D_PER_CHANNEL=len(d) != heads,
        BN=power_of_two(states), BP=_COLUMNS, device=x.device, num_warps=4,
    )  # fmt: skip
    return y
