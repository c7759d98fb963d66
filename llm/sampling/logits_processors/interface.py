"""The interface of a batch-level logits processor: vLLM's V1 names and semantics, so that a class moves over unchanged.

A `BatchUpdate` tells a `LogitsProcessor` which rows of the persistent batch were removed, added or moved.

A step, as a processor sees it:
 1. `update_state(batch_update)` before the forward; None if no row was removed, added or moved. Rows that stay have new
    output tokens: the `output_token_ids` passed when a row was added is a live list.
 2. `apply(logits)` after the forward: float32 [batch_size, vocab], row i is batch row i. Those of rows that sample no
    token in this step (in prefill, or not scheduled) are zero, and their result is discarded.

In a step that verifies drafted tokens both are called once per token a row samples, as in so many steps: the lists hold
the tokens accepted so far, and only the rows that go on sample. A rejected token is never seen.

Callables on the logits of one request are adapted to it: by `AdapterLogitsProcessor`, the base class that wraps a
factory of them, and for a request's own `SamplingParams.logits_processors`, Hugging Face's among them. An exception of
a callable or of the factory ends its request and no other.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from llm.base.checks import refuse
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


T = TypeVar("T")


class BatchUpdateBuilder:
    """Collects the changes of the batch in one step.

    All removals of a step are registered first. Once they have been read, further removals are refused, because new
    rows may have taken the empty indices.

    Attributes:
        added: a list to append to.
        moved: the same.
        batch_changed: True if a row was removed, added or moved in this step.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._removed = removed or []
        self._is_sorted = False
        self.added = added or []
        self.moved = moved or []
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """Removed rows, the highest first."""
        if not self._is_sorted:
            self._removed.sort(reverse=True)
            self._is_sorted = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Register a removal; RuntimeError once removals have been read in this step."""
        if self._is_sorted:
            raise RuntimeError("Cannot register new removed request after self.removed has been read.")
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The lowest empty index, None if there is none."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Take the lowest empty index; None if there is none."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Clear the step; return True if anything had changed."""
        changed = self.batch_changed or bool(self._removed or self.added or self.moved)
        self._clear()
        return changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the step's update, None if nothing changed, and clear the builder."""
        if not (self._removed or self.added or self.moved):
            self._clear()
            return None
        update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self._clear()
        return update

    def _clear(self) -> None:
        # New lists: a `BatchUpdate` returned earlier keeps the old ones.
        self._removed, self.added, self.moved = [], [], []
        self._is_sorted = False
        self.batch_changed = False


def to_device(array: np.ndarray, device: torch.device, is_pin_memory: bool) -> torch.Tensor:
    """The array as a tensor on the device; with pinned memory the host goes on meanwhile. On a CPU nothing is copied
    that is contiguous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if is_pin_memory else tensor).to(device, non_blocking=is_pin_memory)


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply a batch update to a dict from batch row to state.

    Args:
        req_entries: changed in place; rows without state are absent.
        new_state: (params, prompt token ids, live output token ids) -> the state of a new row, or None.

    Returns:
        True if `req_entries` changed.
    """
    if not batch_update:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        changed |= req_entries.pop(row, None) is not None
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            req_entries[row] = state
            changed = True
    for source, target, direction in batch_update.moved:
        moving, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        changed |= moving is not None or replaced is not None
        if moving is not None:
            req_entries[target] = moving
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return changed


# (output token ids, logits [vocab]) -> logits, or (prompt token ids, output token ids, logits) -> logits
RequestLogitsProcessor = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
# logits [vocab] of one request -> the same shape, in place or not
RowFunction = Callable[[torch.Tensor], torch.Tensor]


class AdapterLogitsProcessor(LogitsProcessor):
    """Wraps request-level processors: implement `is_argmax_invariant` and `new_req_logits_processor`.

    A subclass's `__init__` takes the same three arguments and calls `super().__init__` with them. Requests whose
    factory returns None cost nothing.

    Attributes:
        req_info: batch row -> its function of the row's logits.
        row_errors: batch row -> the exception of its callable; the engine takes these after `apply`.
        drawing: the batch rows that sample a token in this step; only their callables are called. None: all.
    """

    drawing: Collection[int] | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, RowFunction] = {}
        self.row_errors: dict[int, Exception] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable for a request with these params, None when it needs none."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, function in self.req_info.items():
            if self.drawing is not None and row not in self.drawing:
                continue
            try:
                before = logits[row]
                after = function(before)
                if after is not before:
                    logits[row] = checked_row(after, before)
            except Exception as error:
                self.row_errors[row] = error
        return logits

    def is_idle(self) -> bool:
        return not self.req_info

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> RowFunction | None:
        try:
            processor = self.new_req_logits_processor(params)
            return None if processor is None else bind(processor, prompt_ids, output_ids)
        except Exception as error:
            return _raising(error)


def bind(processor: Callable[..., torch.Tensor], prompt_ids: list[int] | None, output_ids: list[int]) -> RowFunction:
    """A request-level callable with its token ids bound; the list of output ids is live.

    Raises:
        ValueError: it takes the prompt's ids, and the prompt has none.
    """
    if count_arguments(processor) == 3:
        if prompt_ids is None:
            raise ValueError("Prompt token ids are required for this logits processor but were not provided.")
        return lambda logits: processor(prompt_ids, output_ids, logits)
    return lambda logits: processor(output_ids, logits)


def count_arguments(processor: Callable[..., object]) -> int:
    """Number of positional arguments to pass: all required ones, or two if the rest have defaults."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [item for item in inspect.signature(processor).parameters.values() if item.kind in kinds]
    required = sum(item.default is inspect.Parameter.empty for item in parameters)
    return required if required > 2 else min(len(parameters), 2)


def checked_row(after: object, before: torch.Tensor) -> torch.Tensor:
    """The result of a callable if it is logits [vocab]; TypeError or ValueError otherwise."""
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"a logits processor must return the row's logits, got {type(after).__name__}")
    if after.shape != before.shape:
        raise ValueError(f"a logits processor must return {tuple(before.shape)} logits, got {tuple(after.shape)}")
    return after


def _raising(error: Exception) -> RowFunction:
    """The function of a request whose factory raised: raises again in `apply`, where the request can be ended."""

    def function(logits: torch.Tensor) -> torch.Tensor:
        raise error

    return function


class RequestLogitsProcessors(AdapterLogitsProcessor):
    """Applies each request's own callables in order."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """All callables of the request as one that also takes the prompt."""
        processors = [with_prompt(processor) for processor in params.logits_processors or []]
        if not processors:
            return None

        def apply_all(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            for processor in processors:
                logits = checked_row(processor(prompt_ids, output_ids, logits), logits)
            return logits

        return apply_all


def with_prompt(processor: Callable[..., torch.Tensor]) -> Callable[[list[int], list[int], torch.Tensor], torch.Tensor]:
    """A request processor of each kind as a callable of (prompt ids, output ids, logits [vocab])."""
    if is_hugging_face(processor):

        def whole_sequence(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            input_ids = torch.tensor([prompt_ids + output_ids], device=logits.device)
            return processor(input_ids, logits.unsqueeze(0)).squeeze(0)

        return whole_sequence

    def of_ids(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        bound: RowFunction = bind(processor, prompt_ids, output_ids)
        return bound(logits)

    return of_ids


def is_hugging_face(processor: object) -> bool:
    """True for one of transformers' processors or a list of them, decided without importing transformers."""
    names = {"LogitsProcessor", "LogitsProcessorList"}
    return any(kind.__module__.startswith("transformers.") and kind.__name__ in names for kind in type(processor).mro())


def check_request_processors(params: SamplingParams) -> None:
    """Raise `ValidationError` for a callable that takes neither two nor three arguments."""
    for processor in params.logits_processors or []:
        if is_hugging_face(processor):
            continue
        try:
            count = count_arguments(processor)
        except (TypeError, ValueError):  # written in C, without a signature
            count = 0
        if count not in (2, 3):
            right = "callables of (output ids, logits) or (prompt ids, output ids, logits)"
            refuse("logits_processors", processor, right)
