"""One way to build, feed and judge an operation, and how inputs are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One way to construct an operation.

    Attributes:
        build: dtype of the parameters -> the operation.
        inputs: (rows, dtype, generator) -> its arguments.
        reference: (operation, *arguments in float64) -> what it must return, in float64.
        tolerance: of the float32 arithmetic, relative to the largest element of the result.
        returns: the type of the result; None: that of the parameters, which the inputs have too.
        roundings: how often the result is rounded to its type.
        judge: checks what came out, in place of a comparison; (operation, result, inputs, dtype).
    """

    build: Callable[[torch.dtype], nn.Module]
    inputs: Callable[[int, torch.dtype, torch.Generator], Inputs]
    reference: Callable[..., Any]
    tolerance: float = 2e-6
    returns: torch.dtype | None = None
    roundings: int = 1
    judge: Callable[..., None] | None = None


def normal(*shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def tensors(*widths: int, scale: float = 1.0) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    """One input [rows, width] per width."""

    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return tuple(normal(rows, width, dtype=dtype, generator=generator, scale=scale) for width in widths)

    return make
