"""Request-level logits processors, callables on the logits of one request, adapted to the batch-level interface.

Owns `AdapterLogitsProcessor`, the base class that wraps a factory of such callables. An exception of a callable or of
the factory ends its request and no other.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from llm.sampling.logits_processors.interface import BatchUpdate, LogitsProcessor
from llm.sampling.logits_processors.state import process_dict_updates
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.config.engine import VllmConfig

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
