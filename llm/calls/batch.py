"""A batch call: the rows of `LLM.generate`, from the engine's queue to their outputs.

Prompts that cannot be run are refused in their places, and of a call that ends early everything that was computed is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm.base.checks import check_choice, refuse
from llm.calls.arguments import Priority, check_captured, give_priority
from llm.calls.flow import Entry
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState, output_without_run, warn_of_errors
from llm.engine.preprocess import RowNumbers, raise_refused
from llm.engine.progress import Progress, check_use_tqdm
from llm.engine.prompts import list_prompts
from llm.engine.rows import ON_TOO_LONG, AnyRow, Row
from llm.errors import GenerationInterrupted
from llm.outputs import RequestOutput, RequestOutputs
from llm.platforms.limits import explain_memory_errors
from llm.progress import UseTqdm

if TYPE_CHECKING:
    from llm.jobs.checkpoint import Checkpoint
    from llm.llm import LLM

OnOutput = Callable[[RequestOutput], object]


@dataclass(frozen=True)
class CallOptions:
    """How a call treats its rows: arguments of `LLM.generate`, checked."""

    use_tqdm: UseTqdm
    on_error: str = "raise"
    on_too_long: str = "error"
    on_interrupt: str = "raise"
    on_output: OnOutput | None = None
    checkpoint: object = None

    def __post_init__(self) -> None:
        check_use_tqdm(self.use_tqdm)
        check_choice("on_error", self.on_error, ("raise", "return"))
        check_choice("on_too_long", self.on_too_long, ON_TOO_LONG)
        check_choice("on_interrupt", self.on_interrupt, ("raise", "return"))
        if self.on_output is not None and not callable(self.on_output):
            refuse("on_output", self.on_output, "a callable that takes an output, or None")

    def raise_interrupt(self, guard: InterruptGuard, outputs: RequestOutputs) -> None:
        """Raise `GenerationInterrupted` if there was a Ctrl-C and the call does not return its outputs instead."""
        if guard.requested and self.on_interrupt == "raise":
            raise GenerationInterrupted(outputs)


class BatchCall:
    """The rows of one call, refused ones and those whose output is known included. `options.checkpoint` is a file that
    keeps its outputs."""

    def __init__(self, llm: LLM, rows: Sequence[AnyRow], guard: InterruptGuard, options: CallOptions) -> None:
        self._llm: LLM | None = llm
        self._rows: Sequence[Entry] = rows
        self._guard = guard
        self._options = options
        self._checkpoint: Checkpoint | None = None
        if options.checkpoint is not None:
            from llm.jobs.checkpoint import Checkpoint
            from llm.jobs.identity import identity_of

            self._checkpoint = Checkpoint(options.checkpoint, identity_of(llm))
            self._rows = self._checkpoint.entries(rows)
        self._states: dict[int, PromptState] = {}  # by place among the rows
        self._ended: list[PromptState] = []
        self._given_out: dict[str, RequestOutput] = {}  # by request id; what `on_output` was given
        self._progress = Progress(options.use_tqdm, len(rows))

    def run(self, engine: Engine) -> RequestOutputs:
        """The outputs, in the order of the rows.

        Raises:
            GenerationInterrupted: Ctrl-C; with the outputs so far.
        """
        ended = None if self._options.on_output is None and self._checkpoint is None else self._ended
        try:
            for place, row in enumerate(self._rows):
                if not isinstance(row, Row):
                    output = self._output(place, row)
                    self._progress.settle(output.error is not None)
                    self._tell(output)
                else:
                    self._states[place] = engine.add(row, ended=ended)
                    self._progress.add(self._states[place])
            with closing(self._progress):
                engine.run(list(self._states.values()), lambda: self._between_steps(engine))
            self._take_ended()
            outputs = self.outputs()
            warn_of_errors(outputs)
            return outputs
        except GenerationInterrupted as interrupted:
            self._remember()
            engine.abort(list(self._states.values()))
            if self._options.on_interrupt == "raise":
                raise
            return RequestOutputs(interrupted.outputs)
        except BaseException:  # from a callback, the user's signal handler or a second Ctrl-C: at any point
            self._guard.end()
            with explain_memory_errors("answer the prompts"):
                self._remember()
                engine.reset()
                raise
        finally:
            if self._checkpoint is not None:
                self._checkpoint.end(self._states.values())
            self._abort_dropped(engine)
            self._llm = None  # kept for `outputs`, this must not keep the model alive

    def outputs(self) -> RequestOutputs:
        """What there is of each row; with finish_reason "interrupted" where it has not ended."""
        return RequestOutputs(self._output(place, row) for place, row in enumerate(self._rows))

    def _output(self, place: int, row: Entry) -> RequestOutput:
        if isinstance(row, RequestOutput):
            return row
        state = self._states.get(place)
        if state is None:
            return output_without_run(row)
        return self._given_out.get(state.request_id) or state.last_output()

    def _between_steps(self, engine: Engine) -> None:
        self._abort_dropped(engine)
        self._progress.update()
        self._take_ended()
        if self._checkpoint is not None:
            self._checkpoint.after_step(self._states.values())
        if self._guard.requested:
            self._guard.end()
            raise GenerationInterrupted(self.outputs())

    def _take_ended(self) -> None:
        while self._ended:
            state = self._ended.pop(0)
            output = self._given_out[state.request_id] = state.output()
            if self._checkpoint is not None:
                self._checkpoint.keep(output)
            self._tell(output)

    def _tell(self, output: RequestOutput) -> None:
        if self._options.on_output is not None:
            self._options.on_output(output)

    def _abort_dropped(self, engine: Engine) -> None:
        if self._llm is not None:
            self._llm._abort_dropped(engine)

    def _remember(self) -> None:
        if self._llm is not None:
            self._llm._unfinished = self


def prompt_rows(
    llm: LLM,
    prompts: object,
    params: object,
    tokenization_kwargs: Mapping[str, object] | None,
    options: CallOptions,
    priority: Priority,
) -> list[AnyRow]:
    """The rows of a call's prompts; raises `ValidationError` that names each bad one, unless `on_error="return"`."""
    # The seeds of a call that another process may go on with depend on nothing but the row.
    numbers = None if options.checkpoint is None else RowNumbers(0, 0)
    rows = llm._preprocessor.checked_rows(
        list_prompts(prompts),
        params,
        llm.get_default_sampling_params,
        tokenization_kwargs,
        options.on_too_long,
        numbers,
    )
    if options.on_error == "raise":
        raise_refused(rows)
    give_priority(rows, priority)
    if options.checkpoint is not None and any(isinstance(row, Row) and row.params.inside is not None for row in rows):
        refuse("checkpoint", options.checkpoint, "None with captures, which the file does not keep; see LLM.run")
    check_captured(rows)
    return rows
