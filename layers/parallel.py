"""Tensor parallelism as one layer sees it: this rank's slice of a matrix, and gathering what the ranks computed.

Nothing is added up over ranks: every output is computed whole by one of them, and then all have it. So the bits of an
answer do not depend on the number of ranks. A group of one needs no communicator; a larger group uses the platform's
(`layers/communicators.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from llm.errors import LLMError, ValidationError
from llm.platforms.interface import Platform


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one `LLM` find each other.

    Attributes:
        folder: an empty folder that only this user can read, until all ranks have met, or to the end of a communicator
            that `meets_again`.
        timeout_s: how long a rank waits for another inside a step.
    """

    folder: Path
    timeout_s: float


class Communicator:
    """The collectives that layers use; the result is the same on every rank.

    A platform names a subclass in `Platform.get_communicator_cls`. All ranks call the same ones in the same order.
    Tensors are of the rank's device, and floats, of which every bit is kept.

    Attributes:
        medium: what they go through, in words.
        is_recorded: steps with them may be recorded (`Backend.record`).
        needs_own_device: no two ranks may be on one device.
        meets_again: after `restart` ranks need the rendezvous's folder again, and steps that were recorded before are
            to be forgotten.
    """

    medium: ClassVar[str] = ""
    is_recorded: ClassVar[bool] = True
    needs_own_device: ClassVar[bool] = False
    meets_again: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, platform: Platform) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [..., n], concatenated along the last dimension in order of rank.

        Raises `RankError` if another rank does not come, or came with another shape.
        """
        raise NotImplementedError

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """x [m, n] of each rank, owners int64 [m] -> [m, n], whose row i is that of rank owners[i]. Raises as above."""
        every = self.all_gather(x).view(-1, x.shape[-1])
        return every[torch.arange(0, len(every), self.size, device=x.device) + owners]

    def abort(self) -> None:
        """End the step for all ranks: those that wait, and those that come, get a `RankError`. From any thread."""
        raise NotImplementedError

    def restart(self) -> None:
        """Forget an aborted step; called by rank 0 while no other rank is in a step."""
        raise NotImplementedError

    def watch(self) -> None:
        """Called by rank 0 when it has asked its device for what ranks do together: where calls do not wait for the
        others, they are to have come within the rendezvous's timeout from now on, or the step is aborted."""

    def check(self) -> None:
        """Raise the `RankError` of a step that was aborted after its calls had returned: what was gathered is wrong."""

    def close(self) -> None:
        """Let go of what the ranks share."""


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

    def share(self, name: str, total: int, layer: str = "") -> int:
        """`total` / `size`; raises `ValidationError`, which names the layer, if it does not divide evenly."""
        if total % self.size:
            of_layer = f"{layer}: " if layer else ""
            raise ValidationError(
                f"{of_layer}{name}={total} cannot be split evenly over {self.size} ranks.", parameter=name, value=total
            )
        return total // self.size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self._connected().all_gather(x)

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self._connected().pick(x, owners)

    def _connected(self) -> Communicator:
        if self.communicator is None:
            raise LLMError(f"rank {self.rank} of {self.size} has no communicator to combine results with.")
        return self.communicator


SINGLE = TensorParallel()
