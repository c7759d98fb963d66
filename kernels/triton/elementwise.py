"""Norms, gated activations and rotary embeddings: one program for each row, or for a part of one.

A row's sums are of one tile, whose shape depends on the row's width alone.
"""

from __future__ import annotations

import math

import torch

import triton
import triton.language as tl
from llm.kernels.reference.activation import _require_even
from llm.kernels.reference.elementwise import check_gated_norm
from llm.kernels.triton.language import rounded, sigmoid, tanh
from llm.kernels.triton.launch import launch, power_of_two

# Channels of a program where channels do not depend on each other.
_BLOCK = 1024
# PyTorch's names of it.
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@triton.jit
def norm(x, residual, weight, bias, y, total, width, counted, eps, weight_offset, stride_x, stride_r,
         IS_CENTRED: tl.constexpr, ROUNDS_FIRST: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """y = norm(x + residual) of a row; the sum goes to `total`. counted: leading channels of the mean square.
    ROUNDS_FIRST: also before the weight."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < width
    value = tl.load(x + row * stride_x + lanes, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value = value + tl.load(residual + row * stride_r + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + lanes, rounded(value, total.dtype.element_ty), mask=inside)
    if IS_CENTRED:
        value = tl.where(inside, value - tl.div_rn(tl.sum(value, axis=0), tl.cast(width, tl.float32)), 0.0)
    squares = tl.where(lanes < counted, value * value, 0.0)
    mean = tl.div_rn(tl.sum(squares, axis=0), tl.cast(counted, tl.float32))
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if ROUNDS_FIRST:
        value = rounded(value, y.dtype.element_ty).to(tl.float32)
    if weight is not None:
        value = value * (tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32) + weight_offset)
    if bias is not None:
        value = value + tl.load(bias + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + lanes, rounded(value, y.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm(x, gate, weight, y, size, eps, stride_x, stride_g, IS_BEFORE: tl.constexpr, IS_SILU: tl.constexpr,
               LANES: tl.constexpr):  # fmt: skip
    """A group of channels of a row: norm(x * act(gate)), or norm(x) * act(gate)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < size
    at = tl.program_id(1) * size + lanes
    value = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        own = tl.load(gate + row * stride_g + at, mask=inside, other=0.0).to(tl.float32)
        factor = own * sigmoid(own) if IS_SILU else sigmoid(own)
        if not IS_BEFORE:
            value = value * factor
    if weight is not None:
        mean = tl.div_rn(tl.sum(value * value, axis=0), size.to(tl.float32))
        value = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if gate is not None and IS_BEFORE:
        value = value * factor
    tl.store(y + row * (size * tl.num_programs(1)) + at, rounded(value, y.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of a gate, float32."""
    if KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated(x, y, width, stride_x, KIND: tl.constexpr, IS_LAST: tl.constexpr, BLOCK: tl.constexpr):
    """y = act(gate) * value of a row [2 * width]; IS_LAST: the gate is the second half."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    first = tl.load(x + row * stride_x + lanes, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * stride_x + width + lanes, mask=inside, other=0.0).to(tl.float32)
    value = first * activate(second, KIND) if IS_LAST else activate(first, KIND) * second
    tl.store(y + row * width + lanes, rounded(value, y.dtype.element_ty), mask=inside)


@triton.jit
def gated_sparse(x, y, width, stride_x, deviations, KIND: tl.constexpr, LANES: tl.constexpr):
    """As `gated`, of a gate that keeps what exceeds mean + deviations * std of its row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < width
    gate = tl.load(x + row * stride_x + lanes, mask=inside, other=0.0).to(tl.float32)
    count = tl.cast(width, tl.float32)
    gate = tl.where(inside, gate - tl.div_rn(tl.sum(gate, axis=0), count), 0.0)
    std = tl.sqrt_rn(tl.div_rn(tl.sum(gate * gate, axis=0), count))
    kept = tl.maximum(gate - std * deviations, 0.0)
    value = tl.load(x + row * stride_x + width + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + lanes, rounded(activate(kept, KIND) * value, y.dtype.element_ty), mask=inside)


@triton.jit
def rotate(positions, query, key, query_out, key_out, cos_sin, stride_q, stride_k, heads, HALF: tl.constexpr,
           HEAD: tl.constexpr, IS_NEOX: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """One head of one token; heads behind `heads` are of keys."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    others = tl.num_programs(1) - heads
    is_key = head >= heads
    own = tl.where(is_key, head - heads, head)
    angle = cos_sin + tl.load(positions + token) * (2 * HALF)
    lanes = tl.arange(0, LANES)
    inside = lanes < HALF
    cos = tl.load(angle + lanes, mask=inside, other=0.0)
    sin = tl.load(angle + HALF + lanes, mask=inside, other=0.0)
    first = lanes if IS_NEOX else 2 * lanes
    second = HALF + lanes if IS_NEOX else 2 * lanes + 1
    if is_key:
        x = key + token * stride_k + own * HEAD
        y = key_out + (token * others + own) * HEAD
        _rotate_head(x, y, first, second, inside, cos, sin, HALF, HEAD, REST)
    else:
        x = query + token * stride_q + own * HEAD
        y = query_out + (token * heads + own) * HEAD
        _rotate_head(x, y, first, second, inside, cos, sin, HALF, HEAD, REST)


@triton.jit
def _rotate_head(x, y, first, second, inside, cos, sin, HALF: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr):
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + first, rounded(a * cos - b * sin, y.dtype.element_ty), mask=inside)
    tl.store(y + second, rounded(b * cos + a * sin, y.dtype.element_ty), mask=inside)
    if HEAD > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)
        tl.store(y + rest, tl.load(x + rest, mask=rest < HEAD, other=0.0), mask=rest < HEAD)


# --- The operations. ---


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., d] -> [rows, d] with channels side by side; a copy only where there must be one."""
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    return x.reshape(shape) if x.stride(-1) == 1 else x.contiguous().view(shape)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    counted: int,
    offset: float,
    is_centred: bool,
    rounds_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = _rows(x), x.shape[-1]
    more = None if residual is None else _rows(residual)
    lanes = power_of_two(width)
    launch(
        norm, (len(rows),), rows, more, weight, bias, y, total, width, counted, float(eps), float(offset),
        rows.stride(0), 0 if more is None else more.stride(0), IS_CENTRED=is_centred, ROUNDS_FIRST=rounds_first,
        LANES=lanes, device=x.device, num_warps=min(8, max(1, lanes // 512)),
    )  # fmt: skip
    return y, total


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
) -> torch.Tensor:
    """See `kernels/reference/elementwise.py`."""
    return _norm(x, None, weight, None, eps, variance_size or x.shape[-1], weight_offset, False, rounds_first)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels/reference/elementwise.py`."""
    return _norm(x, residual, weight, None, eps, variance_size or x.shape[-1], weight_offset, False, rounds_first)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels/reference/elementwise.py`."""
    return _norm(x, None, weight, bias, eps, x.shape[-1], 0.0, True)[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kernels/reference/elementwise.py`."""
    return _norm(x, residual, weight, bias, eps, x.shape[-1], 0.0, True)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> torch.Tensor:
    """See `kernels/reference/elementwise.py`."""
    check_gated_norm(x, gate, weight, groups, activation)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = _rows(x), x.shape[-1] // groups
    gates = None if gate is None else _rows(gate)
    launch(
        gated_norm, (len(rows), groups), rows, gates, weight, y, size, float(eps), rows.stride(0),
        0 if gates is None else gates.stride(0), IS_BEFORE=norm_before_gate, IS_SILU=activation == "silu",
        LANES=power_of_two(size), device=x.device, num_warps=min(8, max(1, power_of_two(size) // 512)),
    )  # fmt: skip
    return y


def _gated(x: torch.Tensor, kind: str, is_last: bool = False) -> torch.Tensor:
    _require_even(x)
    rows, width = _rows(x), x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, power_of_two(width))
    launch(
        gated, (len(rows), -(-width // block)), rows, y, width, rows.stride(0), KIND=kind, IS_LAST=is_last, BLOCK=block,
        device=x.device, num_warps=4,
    )  # fmt: skip
    return y


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `kernels/reference/activation.py`."""
    return _gated(x, "silu")


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """See `kernels/reference/activation.py`."""
    return _gated(x, "silu", is_last=True)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """See `kernels/reference/activation.py`."""
    return _gated(x, _GELU[approximate])


def gelu_and_mul_sparse(x: torch.Tensor, deviations: float, approximate: str) -> torch.Tensor:
    """See `kernels/reference/activation.py`."""
    _require_even(x)
    rows, width = _rows(x), x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    launch(
        gated_sparse, (len(rows),), rows, y, width, rows.stride(0), float(deviations), KIND=_GELU[approximate],
        LANES=power_of_two(width), device=x.device, num_warps=8,
    )  # fmt: skip
    return y


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/reference/elementwise.py`."""
    query, key = _rows(query), _rows(key)
    outs = [torch.empty(item.shape, dtype=item.dtype, device=item.device) for item in (query, key)]
    heads, half = query.shape[1] // head_size, cos_sin_cache.shape[1] // 2
    launch(
        rotate, (len(query), heads + key.shape[1] // head_size), positions, query, key, *outs, cos_sin_cache,
        query.stride(0), key.stride(0), heads, HALF=half, HEAD=head_size, IS_NEOX=is_neox_style,
        LANES=power_of_two(half, 1), REST=power_of_two(head_size - 2 * half, 1), device=query.device, num_warps=1,
    )  # fmt: skip
    return outs[0], outs[1]
