"""Tensor parallelism as one layer sees it: which slice of a matrix is this rank's, and how partial results meet.

Owns no processes. A group of one needs no communicator; a larger one gets its platform's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from llm.base.errors import LLMError, ValidationError


class Communicator(Protocol):
    """What layers ask of the processes of a group; the result is the same on every rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [..., n], side by side in the last dimension, in order of rank."""


@dataclass(frozen=True)
class TensorParallel:
    """A place in a tensor-parallel group: rank `rank` of `size`.

    Without a communicator a layer of a larger group computes its own part and cannot combine parts.
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
        """`total` divided by the ranks; raises `ValidationError` when it does not divide."""
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
