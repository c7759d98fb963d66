"""Rows that a product computes as it reads them: a norm or an activation and the product after it as one operation.

Owns `RowOperation` (what computes a row), `Rows` (the operation and what it is given: stands for a matrix where a
product takes one), and the marks of functions that know of them. `kernels/cpu/rows.py` has the same functions, for
products that never write the rows to memory; here a product computes them first, which defines the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from llm.kernels.reference import activation, norm

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class RowOperation:
    """What computes rows [M, K].

    Attributes:
        name: of the operation.
        width: x has this many times K columns: 2 of a gated activation, else 1.
        run: (x) -> rows; where it `adds`, also (x, residual) -> (rows of the sum, x + residual).
        parameters: of a norm, its weight and bias, [K] or None each.
        adds: whether it takes a residual, as norms do.
    """

    name: str
    width: int
    run: Callable[..., Any]
    parameters: tuple[torch.Tensor | None, ...] = ()
    adds: bool = False

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for the sum of x and a residual."""
        return torch.empty_like(x)


class Rows:
    """float32 rows [M, K], computed by whoever reads them; each is read once.

    Args:
        operation: computes them.
        x: float32 [M, K * operation.width], contiguous.
        residual: of the shape and type of x, added to it first; None: nothing is.

    Attributes:
        shape: [M, K].
        total: x + residual, written when the rows are read; None without a residual.

    Raises:
        ValueError: tensors of other types, shapes or layouts, or a residual for an operation that takes none.
    """

    __slots__ = ("operation", "residual", "shape", "total", "x")

    def __init__(self, operation: RowOperation, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        self.operation, self.x, self.residual = operation, x, residual
        if x.dtype is not torch.float32 or x.dim() != 2 or not x.is_contiguous():
            raise ValueError(f"rows are computed from contiguous float32 [M, K], got {x.dtype} {list(x.shape)}")
        self.total: torch.Tensor | None = None
        self.shape = x.shape
        if operation.width > 1:
            self.shape = torch.Size((x.shape[0], x.shape[1] // operation.width))
        if residual is not None:
            is_alike = residual.dtype is torch.float32 and residual.shape == x.shape and residual.is_contiguous()
            if not is_alike or not operation.adds:
                raise ValueError(
                    f"{operation.name} of {list(x.shape)} cannot add {residual.dtype} {list(residual.shape)}"
                )
            self.total = operation.empty_like(x)

    def compute(self) -> torch.Tensor:
        """The rows as a tensor."""
        if self.residual is None or self.total is None:
            return self.operation.run(self.x)
        rows, total = self.operation.run(self.x, self.residual)
        self.total.copy_(total)
        return rows


def computed(x: torch.Tensor | Rows) -> torch.Tensor:
    """`x` as a tensor."""
    return x.compute() if isinstance(x, Rows) else x


def takes_rows(function: F) -> F:
    """Mark: the function may be given `Rows` in place of a tensor, as its first argument after the layer."""
    function.takes_rows = function  # type: ignore[attr-defined]
    return function


def gives_rows(function: F) -> F:
    """Mark: what this method of an operation computes is what the operation's `row_operation()` says."""
    function.gives_rows = function  # type: ignore[attr-defined]
    return function


def marked(function: Any, mark: Callable[..., Any]) -> bool:
    """Whether `mark` (`takes_rows` or `gives_rows`) was put on this very function, not on one that it wraps."""
    function = getattr(function, "__func__", function)
    return getattr(function, mark.__name__, None) is function


def marked_as(function: Any, wrapper: F) -> F:
    """`wrapper` with the marks of `function`: it looks at no argument."""
    for mark in (takes_rows, gives_rows):
        if marked(function, mark):
            mark(wrapper)
    return wrapper


def rms_norm_rows(
    weight: torch.Tensor | None, eps: float, variance_size: int | None = None, weight_offset: float = 0.0
) -> RowOperation:
    """`rms_norm` and `add_rms_norm` of x [M, K]."""

    def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm.rms_norm(x, weight, eps, variance_size, weight_offset)
        return norm.add_rms_norm(x, residual, weight, eps, variance_size, weight_offset)

    return RowOperation("rms_norm", 1, run, (weight,), adds=True)


def layer_norm_rows(weight: torch.Tensor, bias: torch.Tensor, eps: float) -> RowOperation:
    """`layer_norm` and `add_layer_norm` of x [M, K]."""

    def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm.layer_norm(x, weight, bias, eps)
        return norm.add_layer_norm(x, residual, weight, bias, eps)

    return RowOperation("layer_norm", 1, run, (weight, bias), adds=True)


def activation_rows(name: str, *arguments: Any) -> RowOperation:
    """The activation `name` of `kernels/reference/activation.py`, and what it takes after x: "gelu_and_mul", "tanh"."""
    function = getattr(activation, name)
    return RowOperation(name, 2 if "_and_" in name else 1, lambda x: function(x, *arguments))
