"""Activations in C++; `kernels/reference/activation.py` defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library, as_float32, in_type
from llm.kernels.cpu.signatures import KERNELS

# As in activation.cpp.
_SILU, _GELU, _GELU_TANH, _QUICK_GELU, _RELU, _RELU_SQUARED = range(6)
_GELUS = {"none": _GELU, "tanh": _GELU_TANH}
_ACTIVATION = KERNELS["llm_activation"]
_SOFT_CAP = KERNELS["llm_soft_cap"]
_XIELU = KERNELS["llm_xielu"]
_GELU_SPARSE = KERNELS["llm_gelu_sparse"]
_FLOAT_BYTES = 4


def silu_and_mul(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: silu of the first half times the second."""
    return _gated(library, _SILU, x)


def mul_and_silu(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: the first half times silu of the second."""
    return _gated(library, _SILU, x, gate_first=False)


def gelu_and_mul(library: Library, x: torch.Tensor, approximate: str) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: gelu of the first half times the second."""
    return _gated(library, _GELUS[approximate], x)


def silu(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: x sigmoid(x)."""
    return _plain(library, _SILU, x)


def gelu(library: Library, x: torch.Tensor, approximate: str) -> torch.Tensor:
    """float [...] -> [...]: gelu; `approximate` as in torch."""
    return _plain(library, _GELUS[approximate], x)


def gelu_new(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return _plain(library, _GELU_TANH, x)


def quick_gelu(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: x sigmoid(1.702 x)."""
    return _plain(library, _QUICK_GELU, x)


def relu(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: max(x, 0)."""
    return _plain(library, _RELU, x)


def relu2(library: Library, x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: max(x, 0)^2."""
    return _plain(library, _RELU_SQUARED, x)


def soft_cap(library: Library, x: torch.Tensor, cap: float) -> torch.Tensor:
    """float32, in place: cap * tanh(x / cap)."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError(f"soft_cap takes contiguous float32, got {x.dtype}")
    library.call(_SOFT_CAP, x.data_ptr(), cap, x.numel(), torch.get_num_threads())
    return x


def xielu(
    library: Library, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: float
) -> torch.Tensor:
    """float [...] -> [...]: as the definition, whose parameters are float32 here."""
    wide = as_float32(x)
    out = library.empty_like(wide)
    slopes = [as_float32(parameter) for parameter in (alpha_p, alpha_n, beta)]
    addresses = [slope.data_ptr() for slope in slopes]
    library.call(_XIELU, wide.data_ptr(), *addresses, eps, out.data_ptr(), out.numel(), torch.get_num_threads())
    return in_type(out, x.dtype)


def gelu_and_mul_sparse(library: Library, x: torch.Tensor, deviations: float, approximate: str) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: the gate keeps what exceeds mean + deviations * std of its row, then gelu."""
    *shape, width = _halved(x)
    wide = as_float32(x)
    out = library.empty(*shape, width)
    rows = out.numel() // width if width else 0
    library.call(
        _GELU_SPARSE,
        wide.data_ptr(),
        int(approximate == "tanh"),
        deviations,
        out.data_ptr(),
        rows,
        width,
        torch.get_num_threads(),
    )
    return in_type(out, x.dtype)


def _halved(x: torch.Tensor) -> list[int]:
    """The shape of a gated activation's result."""
    *shape, both = x.shape
    if both % 2:
        raise ValueError(f"a gated activation needs an even last dimension, got shape {list(x.shape)}.")
    return [*shape, both // 2]


def _gated(library: Library, function: int, x: torch.Tensor, gate_first: bool = True) -> torch.Tensor:
    *shape, width = _halved(x)
    wide = as_float32(x)
    out = library.empty(*shape, width)
    first = wide.data_ptr()
    second = first + width * _FLOAT_BYTES
    gate, up = (first, second) if gate_first else (second, first)
    rows = out.numel() // width if width else 0
    _call(library, function, gate, up, 2 * width, out, rows, width)
    return in_type(out, x.dtype)


def _plain(library: Library, function: int, x: torch.Tensor) -> torch.Tensor:
    wide = as_float32(x)
    out = library.empty_like(wide)
    width = wide.shape[-1] if wide.dim() else 1
    rows = out.numel() // width if width else 0
    _call(library, function, wide.data_ptr(), 0, width, out, rows, width)
    return in_type(out, x.dtype)


def _call(
    library: Library, function: int, gate: int, up: int, stride: int, out: torch.Tensor, rows: int, width: int
) -> None:
    library.call(_ACTIVATION, function, gate, up, stride, out.data_ptr(), rows, width, torch.get_num_threads())
