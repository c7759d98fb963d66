"""The interface of a batch-level logits processor: vLLM's V1 names and meanings, so that a class moves over unchanged.

Owns `LogitsProcessor` and the plain data that tells it how the rows of the persistent batch came, went and moved.

A step, as a processor sees it:
 1. `update_state(batch_update)`, before the forward; None when no row came, went or moved. Rows that stay have grown:
    the `output_token_ids` a processor was handed when a row was added is the live list.
 2. `apply(logits)`, after it: float32 [batch_size, vocab], line i is batch row i. Lines of rows that draw no token in
    this step (still in their prompt, or not scheduled) hold zeros, and what becomes of them is thrown away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import VllmConfig


class MoveDirectionality(Enum):
    """UNIDIRECTIONAL: row a becomes row b, and a is empty; SWAP: a and b change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest = int
# (row, its params, its prompt's token ids, the live list of its output token ids)
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
# (row a, row b, directionality)
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How the persistent batch changed since the last step.

    The engine changes it in this order, and processors must follow in the order removed, added, moved:
     1. new rows take the places of rows that left, the lowest place first (an added row may so replace another one);
     2. new rows beyond those extend the batch; or else, places that stayed empty are `removed`, and
     3. the batch is condensed: the highest row moves to the lowest empty place, until there is none.

    Attributes:
        batch_size: rows in the batch once all of it is done.
        removed: rows that left and were not replaced.
        added: rows at the place where they came in, before any move.
        moved: in order.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of the rows that ask for it, and of no others.

    A subclass need not call `super().__init__`. Beyond vLLM's interface: `is_idle` lets the engine pass over a
    processor, and a processor that has a `row_errors: dict[int, Exception]` can end single rows: what `apply` leaves
    there is taken out, and each row ends with `finish_reason="error"` and its exception in the output. An exception
    that leaves `apply` or `update_state` cannot be told to belong to a row and fails the call.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request's params (its `extra_args`, above all) are not usable.

        Called for every row of a call before any work starts; the error reaches the caller as a `ValidationError`.
        """
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [batch_size, vocab] -> the same shape, changed in place or not."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token of a row stays the likeliest; read once, when the processor is made.

        One that says True is applied after the temperature, to rows that draw, and is passed over in a step where
        every row is greedy.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch; called once a step, before the forward."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether `apply` would change nothing in this step, so that it need not be called."""
        return False
