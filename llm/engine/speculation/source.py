"""The interface of a source of drafts, and what it says before it drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llm.engine.batch import InputBatch
from llm.engine.proposer import ComputedStep


@dataclass(frozen=True)
class Offer:
    """What a source can draft for a row.

    Attributes:
        most: number of tokens.
        kind: drafts of one kind are accepted about equally often.
    """

    most: int
    kind: str


class Source(ABC):
    """Drafts tokens for the rows of a batch. A row is known by its request id."""

    #: Seconds that a draft costs besides its line in the next step.
    seconds_per_draft = 0.0
    #: It must see every step.
    follows = False

    def observe(self, step: ComputedStep) -> None:
        """A step has been computed; `offer` and `draft` may follow."""

    @abstractmethod
    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        """What can be drafted after the row's last known token, at most `most` tokens; None: nothing."""
        raise NotImplementedError

    @abstractmethod
    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Row -> drafts, for rows that were offered at least `counts[row]` tokens since the last step."""
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        """The request has left the batch; it may come back."""

    def reset(self) -> None:
        """Forget every request."""

    def close(self) -> None:
        """Free weights and caches."""
