"""The interface of a batch-level logits processor: vLLM's V1 names and semantics, so that a class moves over unchanged.

Owns `LogitsProcessor` and `BatchUpdate`, which tells it which rows of the persistent batch were removed, added or
moved.

A step, as a processor sees it:
 1. `update_state(batch_update)` before the forward; None if no row was removed, added or moved. Rows that stay have new
    output tokens: the `output_token_ids` passed when a row was added is a live list.
 2. `apply(logits)` after the forward: float32 [batch_size, vocab], row i is batch row i. Those of rows that sample no
    token in this step (in prefill, or not scheduled) are zero, and their result is discarded.

In a step that verifies drafted tokens both are called once per token a row samples, as in so many steps: the lists hold
the tokens accepted so far, and only the rows that go on sample. A rejected token is never seen.
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
    """UNIDIRECTIONAL: row a moves to index b, and a is empty; SWAP: a and b swap."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest = int
# (row, params, prompt token ids, live list of output token ids)
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
# (row a, row b, directionality)
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How the persistent batch changed since the last step.

    Processors must apply removed, added, moved in this order, as the engine does:
     1. new rows take the indices of rows that finished, the lowest index first (so an added row may replace another);
     2. further new rows extend the batch; or, if there are none, indices that stay empty are `removed`;
     3. the batch is condensed: the highest row moves to the lowest empty index, until none is empty.

    Attributes:
        batch_size: number of rows after the update.
        removed: rows that finished and were not replaced.
        added: rows at the index where they were added, before any move.
        moved: moves in order.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of the batch rows that use it, and of no others.

    A subclass need not call `super().__init__`. Two additions to vLLM's interface:
    - `is_idle` lets the engine skip a processor.
    - `row_errors: dict[int, Exception]`, if a processor has it, ends single requests. After `apply` the engine takes
      its entries and ends each request with `finish_reason="error"` and the exception in the output. An exception
      raised by `apply` or `update_state` belongs to no single request, so it fails the call.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request's params (above all its `extra_args`) are not usable.

        Called for every request of a call before any work starts; the caller gets a `ValidationError`.
        """
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [batch_size, vocab] -> the same shape, in place or not."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the argmax of a row never changes. Read once, after construction.

        Such a processor is applied after the temperature, and is skipped in steps where every row is greedy.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply a batch update; called once per step, before the forward."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """True if `apply` would change nothing in this step; it is then not called."""
        return False
