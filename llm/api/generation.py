"""`LLM.generate`: the rows of a call, from the engine's queue to their outputs.

Owns what becomes of prompts that cannot be run, of outputs as they end, and of a call that ends early: everything that
was computed is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from llm.api.adapters import LoRARequests, give_adapters
from llm.api.checks import Priority, check_asks_nothing, give_priority
from llm.api.flow import Entry, Unfinished
from llm.api.host import Host
from llm.base.bar import UseTqdm
from llm.base.checks import MISSING, check_choice, refuse, wrong_names
from llm.base.types import JsonObject
from llm.config.arguments import CALLS
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState, output_without_run, warn_of_errors
from llm.engine.preprocess import RowNumbers, raise_refused
from llm.engine.progress import Progress, check_use_tqdm
from llm.engine.prompts import list_prompts
from llm.engine.rows import ON_TOO_LONG, AnyRow, Row
from llm.errors import GenerationInterrupted
from llm.outputs import RequestOutput, RequestOutputs
from llm.sampling_params import SamplingParams

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


class Keeper(Protocol):
    """What keeps the outputs of a call on disk; `llm.jobs.checkpoint.Checkpoint`."""

    def keep(self, output: RequestOutput) -> None: ...
    def after_step(self, states: Collection[PromptState]) -> None: ...
    def end(self, states: Collection[PromptState]) -> None: ...


class BatchCall:
    """The rows of one call, refused ones and those whose output is known included.

    Args:
        keeper: is told of each output as it ends.
    """

    def __init__(
        self,
        llm: GenerationHost,
        rows: Sequence[Entry],
        guard: InterruptGuard,
        options: CallOptions,
        keeper: Keeper | None = None,
    ) -> None:
        self._llm: GenerationHost | None = llm
        self._rows = rows
        self._guard = guard
        self._options = options
        self._keeper = keeper
        self._states: dict[int, PromptState] = {}  # by place among the rows
        self._ended: list[PromptState] = []
        self._told: dict[str, RequestOutput] = {}  # by request id; what `on_output` was given
        self._progress = Progress(options.use_tqdm, len(rows))

    def run(self, engine: Engine) -> RequestOutputs:
        """The outputs, in the order of the rows.

        Raises:
            GenerationInterrupted: Ctrl-C; with the outputs so far.
        """
        ended = None if self._options.on_output is None and self._keeper is None else self._ended
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
            self._remember()
            engine.reset()
            raise
        finally:
            if self._keeper is not None:
                self._keeper.end(self._states.values())
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
        return self._told.get(state.request_id) or state.last_output()

    def _between_steps(self, engine: Engine) -> None:
        self._abort_dropped(engine)
        self._progress.update()
        self._take_ended()
        if self._keeper is not None:
            self._keeper.after_step(self._states.values())
        if self._guard.requested:
            self._guard.end()
            raise GenerationInterrupted(self.outputs())

    def _take_ended(self) -> None:
        while self._ended:
            state = self._ended.pop(0)
            output = self._told[state.request_id] = state.output()
            if self._keeper is not None:
                self._keeper.keep(output)
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


class GenerationHost(Host, Protocol):
    _unfinished: Unfinished | None

    def _identity(self) -> JsonObject: ...
    def _call(self, rows: Sequence[AnyRow], guard: InterruptGuard, options: CallOptions) -> BatchCall: ...

    def _abort_dropped(self, engine: Engine) -> None: ...
    def _rows(
        self,
        prompts: object,
        params: object,
        tokenization_kwargs: Mapping[str, object] | None,
        options: CallOptions,
        priority: Priority,
    ) -> list[AnyRow]: ...


class Generation:
    """Attributes:
    _unfinished: the last call that was interrupted or failed.
    """

    _unfinished: Unfinished | None = None

    def generate(
        self: GenerationHost,
        prompts: object = MISSING,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        mm_processor_kwargs: None = None,
        on_error: str = "raise",
        on_too_long: str = "error",
        on_interrupt: str = "raise",
        on_output: OnOutput | None = None,
        checkpoint: str | Path | None = None,
        **unknown: NoReturn,
    ) -> RequestOutputs:
        """Complete one prompt or many; there is an output for each, in the order of the prompts.

        Args:
            prompts: a string, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, or a list of any of these.
            sampling_params: one for all prompts, or one per prompt; None: the model's defaults.
            lora_request: the adapter of all prompts, or a list with one or None for each (`enable_lora`).
            use_tqdm: a progress bar in tokens, and a line when it ends, if the call takes more than half a second;
                False prints nothing. A callable that takes tqdm's arguments makes the bar; any other is called with a
                `llm.progress.GenerationProgress` at most ten times a second, and when the call ends.
            priority: an integer for all prompts, or one each: with `LLM(scheduling_policy="priority")` the lowest run
                first, else they have no effect. No answer depends on them.
            tokenization_kwargs: `add_special_tokens`; `truncation` with `max_length`, or `truncate_prompt_tokens`, with
                `truncation_side` ("left", the first tokens are cut, or "right").
            on_error: "raise" names every bad prompt before any is run; "return" puts the error into its output
                (`output.error`) and runs the others.
            on_too_long: "error"; "skip": the prompt is not run; "truncate_left" (its first tokens) or "truncate_middle"
                cut it until max_tokens fit, or a quarter of the context where it is None (`num_dropped_tokens`).
            on_interrupt: Ctrl-C raises `GenerationInterrupted` with what there is of each output; "return" returns it.
            on_output: called with each output as it ends.
            checkpoint: a file that keeps each output: the same call in a new process goes on where this one was ended.

        Raises ValidationError, CheckpointError (of an adapter), GenerationInterrupted: see `on_error`, `on_interrupt`.
        """
        if unknown or prompts is MISSING:
            raise wrong_names("LLM.generate", Generation.generate, unknown, CALLS)
        check_asks_nothing(mm_processor_kwargs=mm_processor_kwargs)
        options = CallOptions(use_tqdm, on_error, on_too_long, on_interrupt, on_output, checkpoint)
        # The guard comes first: Ctrl-C must not leave a lock held or some of the rows queued.
        with InterruptGuard() as guard, self._exclusive():
            engine = self._begin()
            rows = self._rows(prompts, sampling_params, tokenization_kwargs, options, priority)
            outputs = self._call(give_adapters(engine, rows, lora_request), guard, options).run(engine)
        options.raise_interrupt(guard, outputs)
        return outputs

    @property
    def last_outputs(self: GenerationHost) -> RequestOutputs | None:
        """What there was of each output when a call last was interrupted or failed; None: that has not happened."""
        return None if self._unfinished is None else RequestOutputs(self._unfinished.outputs())

    def _rows(
        self: GenerationHost,
        prompts: object,
        params: object,
        tokenization_kwargs: Mapping[str, object] | None,
        options: CallOptions,
        priority: Priority,
    ) -> list[AnyRow]:
        # The seeds of a call that another process may go on with depend on nothing but the row.
        numbers = None if options.checkpoint is None else RowNumbers(0, 0)
        default = self.get_default_sampling_params
        rows = self._preprocessor.checked_rows(
            list_prompts(prompts), params, default, tokenization_kwargs, options.on_too_long, numbers
        )
        if options.on_error == "raise":
            raise_refused(rows)
        give_priority(rows, priority)
        return rows

    def _call(self: GenerationHost, rows: Sequence[AnyRow], guard: InterruptGuard, options: CallOptions) -> BatchCall:
        if options.checkpoint is None:
            return BatchCall(self, rows, guard, options)
        from llm.jobs.checkpoint import Checkpoint

        keeper = Checkpoint(options.checkpoint, self._identity())
        return BatchCall(self, keeper.entries(rows), guard, options, keeper)
