"""Sums, products and copies of rows, in plain PyTorch."""

from __future__ import annotations

import torch


def select_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Row i is x[indices[i]]: float or int64 [n, w], int64 [m] -> [m, w]; IndexError for an index outside [0, n)."""
    return x.index_select(0, indices)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float [n, w] twice -> [n, w] of the type of x: x * y."""
    return (x * y).to(x.dtype)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float [n, w] twice -> [n, w] of the type of x: x + y."""
    return (x + y).to(x.dtype)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """float32, in place: x * factor."""
    return x.mul_(factor)


def ids_below(ids: torch.Tensor, limit: int) -> torch.Tensor:
    """int64 [n] -> [n]: ids below `limit`, and 0 in the place of others."""
    return torch.where(ids < limit, ids, 0)
