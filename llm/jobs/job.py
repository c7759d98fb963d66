"""A job: every row of a file to a row of another, through a journal.

Owns the order of things: check the whole input, run what the journal does not have, write the output at once. The
output appears when it is complete; until then all answers are in `OUTPUT.journal` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from time import monotonic

import numpy as np

from llm.api.flow import Entry, Flow, FlowHost
from llm.base.bar import UseTqdm
from llm.base.text import clip
from llm.base.types import JsonObject
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState, output_without_run
from llm.engine.progress import Progress
from llm.engine.rows import AnyRow, RefusedRow, Row
from llm.errors import (
    GenerationInterrupted,
    JobError,
    JobInterrupted,
    LLMError,
    LogitsProcessorError,
    OutOfMemoryError,
    is_out_of_memory,
)
from llm.jobs.answers import Answer, Answers, Ended, Partials
from llm.jobs.finished import sum_of, write_finished
from llm.jobs.identity import rows_key
from llm.jobs.journal import Journal
from llm.jobs.making import Maker, Rows, by_index, row_error
from llm.jobs.replies import Replies
from llm.jobs.shard import Shard
from llm.jobs.tables import Read, read_file, write_rows
from llm.jobs.vectors import num_prompts
from llm.outputs import RequestOutput

_BATCH = 256  # prompts
_PARTIALS_SECONDS = 10.0


@dataclass(frozen=True)
class JobSummary:
    """What a job did.

    Attributes:
        output: the file that was written.
        num_rows: rows of the output.
        num_resumed: of these, answered before this run.
        num_errors: rows answered with an error.
        num_prompt_tokens, num_generated_tokens: of all rows.
        seconds: of this run.
    """

    output: Path
    num_rows: int
    num_resumed: int
    num_errors: int
    num_prompt_tokens: int
    num_generated_tokens: int
    seconds: float


@dataclass(frozen=True)
class JobPlan:
    """What a job is, checked.

    Attributes:
        count: rows of this shard.
        columns: of a table, its columns before those of answers; None: the output is JSONL.
        schema: of Parquet, with the columns of answers.
        on_too_long: as for `LLM.generate`.
        identity: of the model; see `llm.jobs.identity`.
        finished: of the job, once it is finished; see `llm.jobs.finished`.
        model: its name in the output.
    """

    source: Path
    target: Path
    rows: Rows
    shard: Shard
    count: int
    columns: Sequence[str] | None
    schema: object
    on_too_long: str
    identity: Mapping[str, object]
    finished: Mapping[str, object]
    model: str

    def numbered(self) -> Iterator[tuple[int, Read]]:
        """This shard's rows with their indices in the whole input."""
        shard = self.shard
        return islice(enumerate(read_file(self.source)), shard.index, None, shard.count)

    def line(self, answered: JsonObject) -> JsonObject:
        """A row of the output with all columns of a table."""
        return answered if self.columns is None else {name: answered.get(name) for name in self.columns}


@dataclass
class _Count:
    resumed: int = 0
    done: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


@dataclass
class _Running:
    """A row of the file in flight.

    Attributes:
        rows: of the engine, several where it has a list of inputs.
        outputs: of those that have ended, in the order of ending.
        pooled: what the model made of them, by the engine's row.
    """

    key: str
    rows: Sequence[AnyRow]
    outputs: list[RequestOutput] = field(default_factory=list)
    pooled: dict[int, np.ndarray | None] = field(default_factory=dict)

    def ended(self) -> Ended | None:
        """The row, when all of its inputs have ended: their tokens and values one after another."""
        if len(self.outputs) < len(self.rows):
            return None
        output = next((own for own in self.outputs if own.error is not None), self.outputs[0])
        values = [self.pooled.get(id(row)) for row in self.rows]
        if len(values) == 1 or output.error is not None:
            return Ended(self.key, output, values[0] if output.error is None else None)
        token_ids = [token for row in self.rows if isinstance(row, Row) for token in row.token_ids]
        joined = np.concatenate([own for own in values if own is not None])
        return Ended(self.key, replace(output, prompt=None, prompt_token_ids=token_ids), joined)


class Job:
    """One run of a job."""

    def __init__(self, llm: FlowHost, plan: JobPlan, journal: Journal, use_tqdm: UseTqdm) -> None:
        self._llm = llm
        self._plan = plan
        self._journal = journal
        self._running: dict[int, _Running] = {}  # by index
        self._keys = sum_of([])
        self._replies = Replies(llm._preprocessor)
        self._partials = Partials()
        self._partials_at = monotonic() + _PARTIALS_SECONDS
        self._count = _Count()
        self._progress = Progress(use_tqdm, plan.count)
        self._guard: InterruptGuard | None = None
        self._flow: Flow | None = None  # the one that runs

    def run(self) -> JobSummary:
        """Raises `JobInterrupted` at Ctrl-C and SIGTERM, once the journal has everything."""
        started = monotonic()
        with InterruptGuard(terminable=True) as guard, closing(self._progress):
            self._guard = guard
            try:
                self._compute(self._batches())
            except GenerationInterrupted as interrupted:
                done = self._count.done + self._count.resumed
                raise JobInterrupted(interrupted.outputs, done, self._plan.count, guard.signal) from None
            except (MemoryError, RuntimeError, OSError) as error:
                if isinstance(error, LLMError) or not is_out_of_memory(error):
                    raise
                said = clip(str(error).strip() or type(error).__name__)
                raise OutOfMemoryError(
                    f"the machine is out of memory ({said}); what the journal {self._journal.path} has is kept, so run "
                    "the job again with resume=True, and with fewer rows at once (max_num_seqs) or more memory."
                ) from error
            finally:
                guard.end()
                if self._flow is not None:
                    self._write_partials(self._flow)
                self._journal.flush(sync=True)
        count = self._count
        write_finished(self._plan.target, {**self._plan.finished, "rows": self._keys})
        write_rows(self._plan.target, self._answered(), self._plan.schema)
        seconds = monotonic() - started
        return JobSummary(
            self._plan.target,
            count.done + count.resumed,
            count.resumed,
            count.errors,
            count.prompt_tokens,
            count.tokens,
            seconds,
        )

    def _compute(self, batches: Iterator[list[Entry]], is_again: bool = False) -> None:
        """Run the rows, and keep what they end with; `is_again`: they were counted.

        A logits processor sees all rows of a step. If it raises, the rows in flight are run again in halves, until the
        one that it cannot take is alone: the error is that row's.
        """
        while True:
            flow = self._flow = Flow(
                self._llm,
                batches,
                on_step=self._after_step,
                on_admit=None if is_again else self._progress.add,
                on_end=self._note_pooled,
                guard=self._guard,
            )
            try:
                for output in flow:
                    self._keep(output)
                return
            except LogitsProcessorError as error:
                for output in flow.take_ready():
                    self._keep(output)
                rows: list[Entry] = [state.row for state in flow.in_flight()]
                if len(rows) == 1:
                    self._keep(output_without_run(RefusedRow(rows[0].index, row_error(error))))
                    rows = []
            half = len(rows) // 2
            for part in (rows[:half], rows[half:]):
                if part:
                    self._compute(iter([part]), is_again=True)
            batches = chain([flow.waiting()], batches)

    def _batches(self) -> Iterator[list[Entry]]:
        answers = Answers(self._journal.records(self._journal.end))
        for keyed in keyed_rows(self._llm, self._plan):
            yield [
                row
                for place, key, own in keyed
                if not self._is_answered(key, own, answers.take(own[0].index), place)
                for row in own
            ]

    def _is_answered(self, key: str, rows: Sequence[AnyRow], known: Answer | None, place: str) -> bool:
        """True if the journal has the row's answer; else the row continues from what the journal has of it.

        `rows`: the engine's, of one row of the file, which is at `place`.
        """
        row = rows[0]
        self._keys = sum_of([self._keys, key])
        if known is not None and known.key != key:
            raise JobError(
                f"{place} of {self._plan.source} is not the one that the journal {self._journal.path} has: the "
                "input or the parameters have changed; use the old ones, or delete the journal to start again."
            )
        if known is not None and known.output is not None:
            self._count.resumed += 1
            self._progress.settle(failed=False)
            return True
        if isinstance(row, RefusedRow):
            self._progress.settle(failed=True)
        self._progress.expect(len(rows) - 1)
        self._running[row.index] = _Running(key, rows)
        if known is not None and isinstance(row, Row):
            self._partials.written[row.index] = known.continued_by(row, self._llm._preprocessor.config.vocab_size)
        return False

    def _keep(self, output: RequestOutput) -> None:
        running = self._running[output.index]
        running.outputs.append(output)
        ended = running.ended()
        if ended is None:
            return
        del self._running[output.index]
        self._partials.written.pop(output.index, None)
        self._journal.add(ended.record())
        self._journal.flush()
        self._count.done += 1

    def _note_pooled(self, state: PromptState) -> None:
        self._running[state.row.index].pooled[id(state.row)] = state.completions[0].request.pooled

    def _after_step(self, flow: Flow) -> None:
        self._progress.update()
        if monotonic() > self._partials_at:
            self._write_partials(flow)
            self._journal.flush()
            self._partials_at = monotonic() + _PARTIALS_SECONDS

    def _write_partials(self, flow: Flow) -> None:
        for state in flow.in_flight():
            index = state.row.index
            if index not in self._running:
                continue
            record = self._partials.record(index, self._running[index].key, state.known_outputs())
            if record is not None:
                self._journal.add(record)

    def _answered(self) -> Iterator[JsonObject]:
        """The rows of the output."""
        plan, answers = self._plan, Answers(self._journal.records(self._journal.end))
        for index, (place, row, _) in plan.numbered():
            known = answers.take(index)
            ended = None if known is None else known.ended()
            if ended is None:
                raise JobError(
                    f"the journal {self._journal.path} lost {place} of {plan.source}; run the job again with "
                    "resume=True."
                )
            ended, line = self._replies.line(plan.rows, row, ended, plan.model)
            self._count.errors += ended.output.error is not None
            self._count.prompt_tokens += len(ended.output.prompt_token_ids)
            self._count.tokens += sum(len(own.token_ids) for own in ended.output.outputs)
            yield plan.line(line)


def keyed_rows(llm: FlowHost, plan: JobPlan) -> Iterator[list[tuple[str, str, Sequence[AnyRow]]]]:
    """The rows of the file in batches: the place of each, its key, and what it is for the engine."""
    maker, numbered = Maker(plan.rows, plan.on_too_long, plan.shard.count), plan.numbered()
    while batch := _next(numbered):
        with llm._exclusive():
            rows = maker.make(llm, llm._open_engine(), batch)
        places = {index: read.place for index, read in batch}
        yield [(places[own[0].index], *_keyed(own, plan.identity)) for own in by_index(rows)]


def _keyed(rows: Sequence[AnyRow], identity: Mapping[str, object]) -> tuple[str, Sequence[AnyRow]]:
    """The engine's rows of one row of the file, with its key; refused if they have none."""
    try:
        return rows_key(rows, identity), rows
    except Exception as error:
        rows = [RefusedRow(rows[0].index, row_error(error))]
    return rows_key(rows, identity), rows


def _next(numbered: Iterator[tuple[int, Read]]) -> list[tuple[int, Read]]:
    """The next rows, that have about `_BATCH` prompts."""
    batch: list[tuple[int, Read]] = []
    room = _BATCH
    while room > 0 and (item := next(numbered, None)) is not None:
        batch.append(item)
        room -= num_prompts(item[1].row)
    return batch
