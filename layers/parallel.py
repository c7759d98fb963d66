"""Tensor parallelism as one layer sees it: this rank's slice of a matrix, and combining the ranks' partial results.

A group of one needs no communicator; a larger group uses the platform's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llm.errors import LLMError, ValidationError
from llm.platforms.interface import Platform
from llm.plugins import load_class


class Communicator:
    """The collectives that layers use; the result is the same on every rank.

    A platform names a subclass in `Platform.get_communicator_cls`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x."""
        raise NotImplementedError

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [..., n], concatenated along the last dimension in order of rank."""
        raise NotImplementedError


@dataclass(frozen=True)
class TensorParallel:
    """A place in a tensor-parallel group: rank `rank` of `size`.

    Without a communicator, a layer of a group larger than one computes its part and cannot combine the parts.
    """

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValidationError(
                f"rank={self.rank} is outside of a group of {self.size}.", parameter="rank", value=self.rank
            )

    def share(self, name: str, total: int) -> int:
        """`total` / `size`; raises `ValidationError` if it does not divide evenly."""
        if total % self.size:
            raise ValidationError(
                f"{name}={total} cannot be split evenly over {self.size} ranks.", parameter=name, value=total
            )
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self._connected().all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self._connected().all_gather(x)

    def _connected(self) -> Communicator:
        if self.communicator is None:
            raise LLMError(f"rank {self.rank} of {self.size} has no communicator to combine results with.")
        return self.communicator


SINGLE = TensorParallel()


def tensor_parallel(platform: Platform, rank: int, size: int) -> TensorParallel:
    """A place in a group of `size`, with the platform's communicator; `ValidationError` if it has none."""
    if size == 1:
        return SINGLE
    who = f"{type(platform).__name__}.get_communicator_cls"
    cls: Any = load_class(platform.get_communicator_cls(), Communicator, who, platform.plugin)
    return TensorParallel(rank, size, cls(rank, size))
