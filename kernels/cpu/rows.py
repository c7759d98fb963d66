"""Rows that a product computes as it reads them, in C++: `kernels/reference/rows.py` defines them.

Owns the memory in which the kernels find what does not change from call to call; row_source.h has the same fields.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from llm.kernels.cpu import activation, norm
from llm.kernels.cpu.library import POINTER, Library
from llm.kernels.cpu.tensors import KINDS, pointer
from llm.kernels.reference.rows import RowOperation, Rows

# Declared in front of the arguments of a product; its own x is not among them.
SOURCE = (POINTER, POINTER, POINTER, POINTER)
_NORM, _ACTIVATION, _GATE_FIRST, _GATE_SECOND = range(4)
_FORMS = {"silu_and_mul": _GATE_FIRST, "mul_and_silu": _GATE_SECOND, "gelu_and_mul": _GATE_FIRST}


class _Norm(ctypes.Structure):
    _fields_ = (
        ("layer", ctypes.c_int64),
        ("parameter_kind", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("variance_size", ctypes.c_int64),
        ("weight_offset", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class _Fields(ctypes.Structure):
    _fields_ = (("form", ctypes.c_int64), ("function", ctypes.c_int64), ("norm", _Norm))


@dataclass(frozen=True)
class KernelRowOperation(RowOperation):
    """`RowOperation` that kernels read at `address()`, while this lives."""

    library: Library
    fields: _Fields
    _written: list[Any] = field(default_factory=list)

    def rows(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Rows:
        return Rows(self, x, residual, None if residual is None else self.library.empty_like(x))

    def address(self) -> int:
        """Where the fields are, with the parameters where they are now: their `data` may have been replaced."""
        now = [None if item is None else (item.data_ptr(), item.dtype) for item in self.parameters]
        if now != self._written:
            weight, bias = (*self.parameters, None)[:2]
            if weight is not None and bias is not None and weight.dtype != bias.dtype:
                raise ValueError(f"weight and bias differ: {weight.dtype}, {bias.dtype}")
            self.fields.norm.weight, self.fields.norm.bias = pointer(weight), pointer(bias)
            self.fields.norm.parameter_kind = 0 if weight is None else KINDS[weight.dtype]
            self._written[:] = now
        return ctypes.addressof(self.fields)


def rms_norm_rows(
    library: Library,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
) -> RowOperation:
    """`rms_norm` and `add_rms_norm` of x [M, K]."""

    def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm.rms_norm(library, x, weight, eps, variance_size, weight_offset)
        return norm.add_rms_norm(library, x, residual, weight, eps, variance_size, weight_offset)

    fields = _Fields(form=_NORM, norm=_Norm(0, 0, None, None, variance_size or 0, weight_offset, eps))
    return KernelRowOperation("rms_norm", 1, run, (weight,), library, fields)


def layer_norm_rows(library: Library, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> RowOperation:
    """`layer_norm` and `add_layer_norm` of x [M, K]; the types of weight and bias are the same."""

    def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm.layer_norm(library, x, weight, bias, eps)
        return norm.add_layer_norm(library, x, residual, weight, bias, eps)

    fields = _Fields(form=_NORM, norm=_Norm(1, 0, None, None, 0, 0.0, eps))
    return KernelRowOperation("layer_norm", 1, run, (weight, bias), library, fields)


def activation_rows(library: Library, name: str, *arguments: Any) -> RowOperation:
    """The activation `name` of `kernels/cpu/activation.py`, with what it takes after x: "gelu_and_mul", "tanh"."""
    form = _FORMS.get(name, _ACTIVATION)
    fields = _Fields(form=form, function=activation.number(name, *arguments))
    run = functools.partial(getattr(activation, name), library)
    return KernelRowOperation(name, 1 if form == _ACTIVATION else 2, lambda x: run(x, *arguments), (), library, fields)


def addresses(given: torch.Tensor | Rows, k: int) -> tuple[int, ...]:
    """The first arguments of a product with inputs of `k` columns: x, or of `Rows` what `SOURCE` declares.

    Raises ValueError for rows that do not fit; a tensor has been checked.
    """
    if not isinstance(given, Rows):
        return (given.data_ptr(),)
    operation, x, residual, total = given.operation, given.x, given.residual, given.total
    if not isinstance(operation, KernelRowOperation):
        raise ValueError(f"{operation.name} was made for PyTorch, not for the CPU kernels")
    _check(x, (*x.shape[:-1], k * operation.width))
    if (residual is None) != (total is None):
        raise ValueError("a residual needs a total to be written to, and a total a residual")
    if residual is not None and total is not None:
        if operation.fields.form != _NORM:
            raise ValueError(f"{operation.name} adds no residual")
        _check(residual, x.shape)
        _check(total, x.shape)
    if operation.fields.norm.variance_size > k:
        raise ValueError(f"variance_size must be from 1 to {k}, got {operation.fields.norm.variance_size}")
    for parameter in operation.parameters:
        if parameter is not None and parameter.shape != (k,):
            raise ValueError(f"a parameter of the norm has shape {list(parameter.shape)}, the product {k} columns")
    return operation.address(), x.data_ptr(), pointer(residual), pointer(total)


def _check(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous() or x.shape != shape:
        raise ValueError(f"contiguous float32 {list(shape)} is needed, got {x.dtype} {list(x.shape)}")
