"""The method of `LLM` that completes the prompts of any iterable, in constant memory.

Owns reading and tokenizing them in batches; `Flow` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

from llm.api.adapters import give_adapters
from llm.api.flow import Entry, Flow, FlowHost
from llm.base.checks import check_choice, check_flag, known_names, refuse
from llm.config.arguments import CALLS
from llm.engine.preprocess import RowNumbers
from llm.engine.prompts import iterate_prompts
from llm.engine.rows import ON_TOO_LONG, AnyRow, RefusedRow
from llm.errors import ValidationError
from llm.inputs import LoRARequest
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams

# Prompts that are tokenized together.
_BATCH = 256


class IterationHost(FlowHost, Protocol):
    def _batches(
        self,
        prompts: Iterator[object],
        params: Iterator[SamplingParams] | SamplingParams | None,
        tokenization_kwargs: Mapping[str, object] | None,
        on_error: str,
        on_too_long: str,
        adapters: Iterator[LoRARequest | None] | LoRARequest | None = None,
    ) -> Iterator[list[Entry]]: ...


class Iteration:
    @known_names("LLM.generate_iter", CALLS)
    def generate_iter(
        self: IterationHost,
        prompts: object,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        ordered: bool = False,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        on_too_long: str = "error",
    ) -> Iterator[RequestOutput]:
        """Complete the prompts of an iterable, and yield each output as it ends; `output.index` is its prompt's place.

        Prompts are read and tokenized in batches, ahead of the engine; memory does not grow with their number. Leaving
        the loop early drops the rows in flight. Other calls may run between two outputs.

        Args:
            prompts: an iterable (a generator, a column of a table, a file, whose lines are prompts) of prompts as
                `generate` takes them, or one prompt.
            sampling_params: one for all, or an iterable with one per prompt; None: the model's defaults.
            ordered: yield in the order of the prompts.
            lora_request: the adapter of all prompts, or an iterable with one or None per prompt.
            tokenization_kwargs: as for `generate`.
            on_error: as for `generate`. With "raise", a bad prompt, or an error of the iterable, is raised after the
                outputs of all prompts before it.
            on_too_long: as for `generate`.

        Raises:
            ValidationError: a prompt or an argument is wrong.
            GenerationInterrupted: Ctrl-C; with what there is of the rows in flight.
        """
        check_flag("ordered", ordered)
        check_choice("on_error", on_error, ("raise", "return"))
        check_choice("on_too_long", on_too_long, ON_TOO_LONG)
        params = _params_of(sampling_params)
        adapters = lora_request if lora_request is None or isinstance(lora_request, LoRARequest) else iter(lora_request)
        given = iterate_prompts(prompts)
        batches = self._batches(given, params, tokenization_kwargs, on_error, on_too_long, adapters)
        return iter(Flow(self, batches, ordered=ordered))

    def _batches(
        self: IterationHost,
        prompts: Iterator[object],
        params: Iterator[SamplingParams] | SamplingParams | None,
        tokenization_kwargs: Mapping[str, object] | None,
        on_error: str,
        on_too_long: str,
        adapters: Iterator[LoRARequest | None] | LoRARequest | None = None,
    ) -> Iterator[list[Entry]]:
        call, first, _ = self._preprocessor.new_call()
        error: Exception | None = None
        while error is None:
            batch, error = _read(prompts)
            if not batch:
                break
            per_row = _next_params(params, len(batch), first)
            of_batch = list(islice(adapters, len(batch))) if isinstance(adapters, Iterator) else adapters
            with self._exclusive():
                engine = self._open_engine()
                rows = self._preprocessor.checked_rows(
                    batch,
                    per_row,
                    self.get_default_sampling_params,
                    tokenization_kwargs,
                    on_too_long,
                    RowNumbers(call, first),
                )
                give_adapters(engine, rows, of_batch)
            first += len(batch)
            if on_error == "raise":
                yield from _until_error(rows)
            else:
                yield [*rows]
        if error is not None:
            raise error


def _read(prompts: Iterator[object]) -> tuple[list[object], Exception | None]:
    """The next prompts, and the error that ended them, if one did."""
    batch: list[object] = []
    try:
        for prompt in islice(prompts, _BATCH):
            batch.append(prompt)
    except Exception as error:
        return batch, error
    return batch, None


def _params_of(given: object) -> Iterator[SamplingParams] | SamplingParams | None:
    if given is None or isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Iterable):
        refuse("sampling_params", type(given).__name__, "a SamplingParams, an iterable of them, or None")
    return iter(given)


def _next_params(
    params: Iterator[SamplingParams] | SamplingParams | None, count: int, first: int
) -> SamplingParams | Sequence[SamplingParams] | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    found = list(islice(params, count))
    if len(found) < count:
        raise ValidationError(
            f"there are {first + len(found)} sampling_params and more prompts; pass one for all, or one for each.",
            parameter="sampling_params",
            value=first + len(found),
        )
    return found


def _until_error(rows: Sequence[AnyRow]) -> Iterator[list[Entry]]:
    """The rows before the first one with an error, as a batch; then raises that error."""
    good: list[Entry] = []
    for row in rows:
        if isinstance(row, RefusedRow) and row.finish_reason == "error":
            yield good
            error = row.error
            message = f"prompt {row.index}: {error}"
            raise ValidationError(message, parameter=error.parameter, value=error.value) from error
        good.append(row)
    yield good
