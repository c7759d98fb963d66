"""Products of quantized activations and integer weights: exact sums in int32, float32 around them.

Twins of the functions of the same names in `kernels/reference/quantized.py`, the library first, and equal to them bit
for bit.
"""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.linear import checked_input, checked_vector
from llm.kernels.cpu.packed import FLOAT_KINDS, PanelWeight
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import pointer

_W8A8 = KERNELS["llm_linear_w8a8"]
_W4A8 = KERNELS["llm_linear_w4a8"]
_WEIGHT_ONLY = KERNELS["llm_linear_weight_only"]
_EMBEDDING = KERNELS["llm_embedding_int8"]
_PER_TOKEN = KERNELS["llm_quantize_per_token"]
_STATIC = KERNELS["llm_quantize_static"]


def quantize_per_token(lib: Library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [M, K] -> q int8 [M, K], scale float32 [M]: the largest magnitude of each row becomes 127."""
    x = checked_input(x, x.shape[-1])
    q, scale = torch.empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1])
    threads = torch.get_num_threads()
    lib.call(_PER_TOKEN, x.data_ptr(), q.data_ptr(), scale.data_ptr(), scale.numel(), x.shape[-1], threads)
    return q, scale


def quantize_static(lib: Library, x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """clamp(round(x / scale) + offset, -128, 127); float32 -> int8 of the same shape."""
    x = checked_input(x, x.shape[-1])
    q = torch.empty(x.shape, dtype=torch.int8)
    lib.call(_STATIC, x.data_ptr(), q.data_ptr(), scale, offset, x.numel(), torch.get_num_threads())
    return q


def linear_w8a8_dynamic(
    lib: Library, x: torch.Tensor, packed: PanelWeight, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = (float(sum_k q w) * xs) * scale + bias with (q, xs) = quantize_per_token(x); x float32 [M, K] -> [M, N]."""
    return _linear_w8a8(lib, x, packed, scale, 0.0, 0, bias)


def linear_w8a8_static(
    lib: Library,
    x: torch.Tensor,
    packed: PanelWeight,
    weight_scale: torch.Tensor,
    input_scale: float,
    input_offset: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = float(sum_k (q - offset) w) * (input_scale * weight_scale) + bias, q = quantize_static(x)."""
    if not input_scale > 0:
        raise ValueError(f"input_scale must be positive, got {input_scale}")
    return _linear_w8a8(lib, x, packed, weight_scale, input_scale, input_offset, bias)


def _linear_w8a8(
    lib: Library,
    x: torch.Tensor,
    packed: PanelWeight,
    scale: torch.Tensor,
    input_scale: float,
    input_offset: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """input_scale 0 stands for dynamic."""
    scales, bias = checked_vector(scale, packed.n), checked_vector(bias, packed.n)
    if scales is None or packed.sums is None:
        raise ValueError(f"a weight of pack_int8 and its scales are needed, got {packed.kind}")
    x = checked_input(x, packed.k)
    rows = x.shape[0]
    out = lib.empty(rows, packed.n)
    lib.call(
        _W8A8,
        x.data_ptr(),
        packed.data.data_ptr(),
        packed.sums.data_ptr(),
        scales.data_ptr(),
        input_scale,
        input_offset,
        pointer(bias),
        out.data_ptr(),
        rows,
        packed.n,
        packed.k,
        torch.get_num_threads(),
    )
    return out


def linear_w4a8(
    lib: Library,
    x: torch.Tensor,
    packed: PanelWeight,
    scale: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = (sum_g float(sum_{k in g} q w) * scale[:, g]) * xs + bias; x float32 [M, K], scale float [N, G] -> [M, N].

    `scale` is read fastest, without a copy, when it lies column by column: `scale.t().contiguous().t()`. With more than
    one group, group_size is a multiple of 8.
    """
    bias = checked_vector(bias, packed.n)
    _check_kind(packed, "int4")
    scale, stride = _by_group(scale, packed, group_size)
    groups = scale.shape[1]
    if groups > 1 and group_size % 8:
        raise ValueError(f"groups are of a multiple of 8 columns, got {group_size}")
    x = checked_input(x, packed.k)
    rows = x.shape[0]
    out = lib.empty(rows, packed.n)
    lib.call(
        _W4A8,
        x.data_ptr(),
        packed.data.data_ptr(),
        scale.data_ptr(),
        FLOAT_KINDS[scale.dtype],
        stride,
        group_size,
        groups,
        pointer(bias),
        out.data_ptr(),
        rows,
        packed.n,
        packed.k,
        torch.get_num_threads(),
    )
    return out


def linear_w8a16(
    lib: Library,
    x: torch.Tensor,
    packed: PanelWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias with W = (w - zero) * scale; the chain of `linear_float` with that weight, x float32 [M, K].

    `scale` and `zero` are read fastest, without a copy, when they lie column by column, as in `linear_w4a8`.
    """
    _check_kind(packed, "int8")
    return _weight_only(lib, x, packed, scale, zero, group_size, bias)


def linear_w4a16(
    lib: Library,
    x: torch.Tensor,
    packed: PanelWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `linear_w8a16`, with an int4 weight."""
    _check_kind(packed, "int4")
    return _weight_only(lib, x, packed, scale, zero, group_size, bias)


def _weight_only(
    lib: Library,
    x: torch.Tensor,
    packed: PanelWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    x, bias = checked_input(x, packed.k), checked_vector(bias, packed.n)
    scale, scale_stride = _by_group(scale, packed, group_size)
    zero, zero_stride = (None, 0) if zero is None else _by_group(zero, packed, group_size)
    rows = x.shape[0]
    out = lib.empty(rows, packed.n)
    lib.call(
        _WEIGHT_ONLY,
        8 if packed.kind == "int8" else 4,
        x.data_ptr(),
        packed.data.data_ptr(),
        scale.data_ptr(),
        FLOAT_KINDS[scale.dtype],
        scale_stride,
        pointer(zero),
        0 if zero is None else FLOAT_KINDS[zero.dtype],
        zero_stride,
        group_size,
        pointer(bias),
        out.data_ptr(),
        rows,
        packed.n,
        packed.k,
        torch.get_num_threads(),
    )
    return out


def _by_group(values: torch.Tensor, packed: PanelWeight, group_size: int) -> tuple[torch.Tensor, int]:
    """Values [N, G] with the rows of a group side by side in memory, and the distance between groups."""
    groups = -(-packed.k // group_size)
    if values.shape != (packed.n, groups):
        raise ValueError(f"scale has shape {list(values.shape)}, groups of {group_size} need {[packed.n, groups]}")
    if values.dtype not in FLOAT_KINDS:
        raise ValueError(f"scales and zero points are float32, bfloat16 or float16, got {values.dtype}")
    if values.stride(0) != 1 and packed.n > 1:
        values = values.t().contiguous().t()
    return values, values.stride(1) if groups > 1 else packed.n


def _check_kind(packed: PanelWeight, kind: str) -> None:
    if packed.kind != kind:
        raise ValueError(f"the weight is of pack_{kind}, got {packed.kind}")


def embedding_int8(lib: Library, token_ids: torch.Tensor, packed: PanelWeight, scale: torch.Tensor) -> torch.Tensor:
    """y[i] = float(w[ids[i]]) * scale[ids[i]]: ids int64 [L] -> [L, K]; IndexError for an id that is none."""
    ids = token_ids.to(torch.int64).contiguous()
    out = lib.empty(*ids.shape, packed.k)
    scales = checked_vector(scale, packed.n)
    if scales is None:
        raise ValueError("an int8 table needs one scale per row")
    table, threads = (packed.data.data_ptr(), scales.data_ptr()), torch.get_num_threads()
    if lib.call(_EMBEDDING, ids.data_ptr(), *table, out.data_ptr(), ids.numel(), packed.n, packed.k, threads):
        raise IndexError(f"token ids must be in [0, {packed.n}), got {int(ids.min())} to {int(ids.max())}")
    return out
