"""A request's own callables, `SamplingParams.logits_processors`.

Owns calling Hugging Face's processors, which take a batch of whole sequences, for one request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from llm.base.checks import refuse
from llm.sampling.logits_processors.adapter import (
    AdapterLogitsProcessor,
    RequestLogitsProcessor,
    RowFunction,
    bind,
    checked_row,
    count_arguments,
)
from llm.sampling_params import SamplingParams


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
