"""Rows that a product computes as it reads them, in C++: `kernels/reference/rows.py` defines them.

Owns the memory in which the kernels find what does not change from call to call; row_source.h has the same fields.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
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


class KernelRowOperation(RowOperation):
    """`RowOperation` that kernels of `library` read at `address(k)`, while this lives."""

    def __init__(
        self,
        library: Library,
        fields: _Fields,
        name: str,
        run: Callable[..., Any],
        parameters: tuple[torch.Tensor | None, ...] = (),
    ) -> None:
        is_gated = fields.form in (_GATE_FIRST, _GATE_SECOND)
        super().__init__(name, 2 if is_gated else 1, run, parameters, adds=fields.form == _NORM)
        self._library = library
        self._fields = fields
        self._address = ctypes.addressof(fields)
        self._written: list[Any] = []

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        return self._library.empty_like(x)

    def address(self, k: int) -> int:
        """Where the fields are, for rows of `k` columns; with the parameters where they are now.

        Raises ValueError for parameters of another size, or of two types.
        """
        now: list[Any] = [k]
        for item in self.parameters:
            if item is not None:
                now += (item.data_ptr(), item.dtype)
        if now != self._written:
            self._write(k)
            self._written = now
        return self._address

    def _write(self, k: int) -> None:
        fields, given = self._fields.norm, [item for item in self.parameters if item is not None]
        if fields.variance_size > k:
            raise ValueError(f"variance_size must be from 1 to {k}, got {fields.variance_size}")
        if any(item.shape != (k,) for item in given) or len({item.dtype for item in given}) > 1:
            found = ", ".join(f"{item.dtype} {list(item.shape)}" for item in given)
            raise ValueError(f"the parameters of a norm of {k} channels are of one type and [{k}], got {found}")
        fields.weight, fields.bias = (pointer(item) for item in (*self.parameters, None, None)[:2])
        fields.parameter_kind = KINDS[given[0].dtype] if given else 0


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
    return KernelRowOperation(library, fields, "rms_norm", run, (weight,))


def layer_norm_rows(library: Library, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> RowOperation:
    """`layer_norm` and `add_layer_norm` of x [M, K]; the types of weight and bias are the same."""

    def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm.layer_norm(library, x, weight, bias, eps)
        return norm.add_layer_norm(library, x, residual, weight, bias, eps)

    fields = _Fields(form=_NORM, norm=_Norm(1, 0, None, None, 0, 0.0, eps))
    return KernelRowOperation(library, fields, "layer_norm", run, (weight, bias))


def activation_rows(library: Library, name: str, *arguments: Any) -> RowOperation:
    """The activation `name` of `kernels/cpu/activation.py`, with what it takes after x: "gelu_and_mul", "tanh"."""
    form = _FORMS.get(name, _ACTIVATION)
    fields = _Fields(form=form, function=activation.number(name, *arguments))
    run = functools.partial(getattr(activation, name), library)
    return KernelRowOperation(library, fields, name, lambda x: run(x, *arguments))


def addresses(given: torch.Tensor | Rows, k: int) -> tuple[int, ...]:
    """The first arguments of a product with inputs of `k` columns: x, or of `Rows` what `SOURCE` declares.

    Raises ValueError for rows that do not fit; a tensor has been checked.
    """
    if not isinstance(given, Rows):
        return (given.data_ptr(),)
    operation = given.operation
    if not isinstance(operation, KernelRowOperation):
        raise ValueError(f"{operation.name} was made for PyTorch, not for the CPU kernels")
    if given.shape[1] != k or given.x.shape[1] != k * operation.width:
        raise ValueError(f"the product takes {k} columns, {operation.name} gives {given.shape[1]}")
    return operation.address(k), given.x.data_ptr(), pointer(given.residual), pointer(given.total)
