"""A flow of rows through the engine: read ahead in batches, given out as they end, in constant memory.

Between two outputs the flow is suspended: its rows stay queued, and other calls may run. `LLM.generate_iter` and jobs
are flows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from llm.base.checks import check_choice, refuse
from llm.calls.arguments import give_adapters, with_inside
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState, output_without_run
from llm.engine.preprocess import RowNumbers
from llm.engine.prompts import iterate_prompts
from llm.engine.rows import ON_TOO_LONG, AnyRow, RefusedRow
from llm.errors import GenerationInterrupted, ValidationError
from llm.inputs import LoRARequest
from llm.inside.request import Captures, Interventions
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.llm import LLM

# In flight are this many times max_num_seqs, so that rows wait for a place in the batch, not the batch for rows.
_AHEAD = 2
# No row is started this many times max_num_seqs after the first unfinished one: so many outputs may wait for it.
_SPREAD = 16
# Prompts that are tokenized together; fewer where they may have images, which are read meanwhile.
_BATCH, _BATCH_WITH_IMAGES = 256, 32

# An entry of a batch: a row to run, or the output of one that needs no run.
Entry = AnyRow | RequestOutput


class Flow:
    """Rows through the engine of an `LLM`; iterate over it once.

    Args:
        batches: entries in the order of their indices; read without the lock of a call.
        ordered: give the outputs in the order of the rows, not of their ends.
        on_step: called after each step, outside the call.
        on_admit: called with each prompt that is queued.
        on_end: called with each prompt that has ended, before its output is given out.
        guard: of a job, which sees Ctrl-C between the steps too.
    """

    def __init__(
        self,
        llm: LLM,
        batches: Iterator[list[Entry]],
        *,
        ordered: bool = False,
        on_step: Callable[[Flow], None] | None = None,
        on_admit: Callable[[PromptState], None] | None = None,
        on_end: Callable[[PromptState], None] | None = None,
        guard: InterruptGuard | None = None,
    ) -> None:
        self._llm = llm
        self._batches = batches
        self._on_step = on_step
        self._on_admit = on_admit
        self._on_end = on_end
        self._guard = guard
        self._ordered = ordered
        self._size = llm._open_engine().max_num_seqs
        # Entries are counted as they are read; the dicts are by this number, in the order of admission or of ending.
        self._count = 0
        self._pending: deque[tuple[int, Entry]] = deque()  # read and not in the engine
        self._states: dict[int, PromptState] = {}
        self._numbers: dict[str, int] = {}  # by request id, of those in `_states`
        self._ended: list[PromptState] = []
        self._ready: dict[int, RequestOutput] = {}  # ended and not given out
        self._next = 0  # given out next, if `ordered`
        self._error: Exception | None = None
        self._all_read = False

    def __iter__(self) -> Iterator[RequestOutput]:
        """The outputs.

        Raises:
            GenerationInterrupted: Ctrl-C; with what there is of the rows that were not given out.
            Exception: of `batches`, once the rows before it have been given out.
        """
        llm = self._llm
        try:
            while not (self._all_read and not self._pending and not self._states and not self._ready):
                self._read()
                with InterruptGuard() as guard, llm._exclusive():
                    self._advance(llm._begin())
                if guard.requested or (self._guard is not None and self._guard.requested):
                    raise GenerationInterrupted(self.outputs())
                if self._on_step is not None:
                    self._on_step(self)
                yield from self._given_out()
            llm._open_engine().end_call()
        except (Exception, KeyboardInterrupt):
            llm._unfinished = self
            raise
        finally:
            llm._drop(*self._states.values())
            del (
                self._llm,
                self._batches,
                self._on_step,
                self._on_admit,
                self._on_end,
            )  # kept for `outputs`, this must not keep the model alive
        if self._error is not None:
            raise self._error

    def in_flight(self) -> list[PromptState]:
        return list(self._states.values())

    def waiting(self) -> list[Entry]:
        """What was read and not started."""
        return [entry for _, entry in self._pending]

    def take_ready(self) -> list[RequestOutput]:
        """Of the rows that have ended, the outputs that were not given out."""
        ready, self._ready = [*self._ready.values()], {}
        return ready

    def outputs(self) -> list[RequestOutput]:
        """What there is of the rows that were read and not given out, in order."""
        waiting = [
            entry if isinstance(entry, RequestOutput) else output_without_run(entry) for _, entry in self._pending
        ]
        found = [*self._ready.values(), *(state.last_output() for state in self._states.values()), *waiting]
        return sorted(found, key=lambda output: output.index)

    def _read(self) -> None:
        """Read batches until enough rows wait. An error of the reader waits until the rows before it are given out."""
        while not self._all_read and len(self._pending) < self._size:
            try:
                for entry in next(self._batches):
                    self._pending.append((self._count, entry))
                    self._count += 1
            except StopIteration:
                self._all_read = True
            except KeyboardInterrupt:
                raise GenerationInterrupted(self.outputs()) from None
            except Exception as error:
                self._error, self._all_read = error, True

    def _advance(self, engine: Engine) -> None:
        self._requeue_dropped()
        self._admit(engine)
        if self._states and not self._ready_now():
            engine.step()
        for state in self._ended:
            if not _is_dropped(state):
                number = self._numbers.pop(state.request_id)
                del self._states[number]
                self._ready[number] = state.output()
                if self._on_end is not None:
                    self._on_end(state)
        self._ended[:] = [state for state in self._ended if _is_dropped(state)]  # in place: the engine has this list

    def _requeue_dropped(self) -> None:
        """Rows that were dropped because another call failed start again: their answers depend on nothing else."""
        for state in reversed([state for state in self._ended if _is_dropped(state)]):
            number = self._numbers.pop(state.request_id)
            self._pending.appendleft((number, self._states.pop(number).row))
            self._ended.remove(state)

    def _admit(self, engine: Engine) -> None:
        while self._pending and len(self._states) < _AHEAD * self._size:
            number, entry = self._pending[0]
            if number >= next(iter(self._states), number) + _SPREAD * self._size:
                break
            self._pending.popleft()
            if isinstance(entry, RequestOutput):
                self._ready[number] = entry
            elif isinstance(entry, RefusedRow):
                self._ready[number] = output_without_run(entry)
            else:
                state = self._states[number] = engine.add(entry, ended=self._ended)
                self._numbers[state.request_id] = number
                if self._on_admit is not None:
                    self._on_admit(state)

    def _ready_now(self) -> bool:
        return self._next in self._ready if self._ordered else bool(self._ready)

    def _given_out(self) -> Iterator[RequestOutput]:
        while self._ready_now():
            number = self._next if self._ordered else next(iter(self._ready))
            self._next = number + 1
            yield self._ready.pop(number)


def _is_dropped(state: PromptState) -> bool:
    return any(completion.request.finish_reason == "abort" for completion in state.completions)


def prompts_at_once(llm: LLM) -> int:
    """How many prompts are read together."""
    return _BATCH if llm._preprocessor.images is None else _BATCH_WITH_IMAGES


def prompt_batches(
    llm: LLM,
    prompts: object,
    sampling_params: SamplingParams | Iterable[SamplingParams] | None,
    lora_request: LoRARequest | Iterable[LoRARequest | None] | None,
    tokenization_kwargs: Mapping[str, object] | None,
    on_error: str,
    on_too_long: str,
    capture: Captures,
    interventions: Interventions,
) -> Iterator[list[Entry]]:
    """The prompts of an iterable, tokenized in batches; a wrong argument is refused at once."""
    check_choice("on_error", on_error, ("raise", "return"))
    check_choice("on_too_long", on_too_long, ON_TOO_LONG)
    params = _params_of(sampling_params)
    adapters = lora_request if lora_request is None or isinstance(lora_request, LoRARequest) else iter(lora_request)
    given = iterate_prompts(prompts)

    def batches() -> Iterator[list[Entry]]:
        call, first, _ = llm._preprocessor.new_call()
        error: Exception | None = None
        while error is None:
            batch, error = _read(given, prompts_at_once(llm))
            if not batch:
                break
            per_row = _next_params(params, len(batch), first)
            of_batch = list(islice(adapters, len(batch))) if isinstance(adapters, Iterator) else adapters
            with llm._exclusive():
                engine = llm._open_engine()
                numbers, default = RowNumbers(call, first), llm.get_default_sampling_params
                asked = with_inside(per_row, capture, interventions, default)
                rows = llm._preprocessor.checked_rows(batch, asked, default, tokenization_kwargs, on_too_long, numbers)
                give_adapters(engine, rows, of_batch)
            first += len(batch)
            if on_error == "raise":
                yield from _until_error(rows)
            else:
                yield [*rows]
        if error is not None:
            raise error

    return batches()


def _read(prompts: Iterator[object], most: int) -> tuple[list[object], Exception | None]:
    """The next prompts, and the error that ended them, if one did."""
    batch: list[object] = []
    try:
        for prompt in islice(prompts, most):
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
