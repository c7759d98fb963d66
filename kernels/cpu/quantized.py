"""Products of quantized activations and integer weights: exact sums in int32, float32 around them.

Twins of the functions of the same names in `kernels/reference/quantized.py`, the library first, and equal to them bit
for bit.
"""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import FLOAT, INT, POINTER, Library
from llm.kernels.cpu.linear import checked_input, checked_vector
from llm.kernels.cpu.packed import PanelWeight

_W8A8 = ("llm_linear_w8a8", POINTER, POINTER, POINTER, POINTER, FLOAT, INT, POINTER, POINTER, INT, INT, INT, INT)
_EMBEDDING = ("llm_embedding_int8", POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT)
_PER_TOKEN = ("llm_quantize_per_token", POINTER, POINTER, POINTER, INT, INT, INT)
_STATIC = ("llm_quantize_static", POINTER, POINTER, FLOAT, INT, INT, INT)


def quantize_per_token(lib: Library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [M, K] -> q int8 [M, K], scale float32 [M]: the largest magnitude of each row becomes 127."""
    x = checked_input(x, x.shape[-1])
    q, scale = torch.empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1])
    quantize = lib.function(*_PER_TOKEN)
    quantize(x.data_ptr(), q.data_ptr(), scale.data_ptr(), scale.numel(), x.shape[-1], torch.get_num_threads())
    return q, scale


def quantize_static(lib: Library, x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """clamp(round(x / scale) + offset, -128, 127); float32 -> int8 of the same shape."""
    x = checked_input(x, x.shape[-1])
    q = torch.empty(x.shape, dtype=torch.int8)
    lib.function(*_STATIC)(x.data_ptr(), q.data_ptr(), scale, offset, x.numel(), torch.get_num_threads())
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
    x = checked_input(x, packed.k)
    scales, bias = checked_vector(scale, packed.n), checked_vector(bias, packed.n)
    if scales is None or packed.sums is None:
        raise ValueError(f"a weight of pack_int8 and its scales are needed, got {packed.kind}")
    out = x.new_empty((x.shape[0], packed.n))
    lib.function(*_W8A8)(
        x.data_ptr(),
        packed.data.data_ptr(),
        packed.sums.data_ptr(),
        scales.data_ptr(),
        input_scale,
        input_offset,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        packed.n,
        packed.k,
        torch.get_num_threads(),
    )
    return out


def embedding_int8(lib: Library, token_ids: torch.Tensor, packed: PanelWeight, scale: torch.Tensor) -> torch.Tensor:
    """y[i] = float(w[ids[i]]) * scale[ids[i]]: ids int64 [L] -> [L, K]; IndexError for an id that is none."""
    ids = token_ids.to(torch.int64).contiguous()
    out = torch.empty((*ids.shape, packed.k), dtype=torch.float32)
    scales = checked_vector(scale, packed.n)
    if scales is None:
        raise ValueError("an int8 table needs one scale per row")
    gather, threads = lib.function(*_EMBEDDING, result=INT), torch.get_num_threads()
    data = packed.data.data_ptr()
    if gather(ids.data_ptr(), data, scales.data_ptr(), out.data_ptr(), ids.numel(), packed.n, packed.k, threads):
        raise IndexError(f"token ids must be in [0, {packed.n}), got {int(ids.min())} to {int(ids.max())}")
    return out
