"""`LLM.run`: check the whole input, run what the journal does not have, write the output at once.

The output appears when it is complete; until then all answers are in `OUTPUT.journal` beside it.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from llm.base.checks import check_choice, check_flag, refuse
from llm.base.optional import optional_package
from llm.base.text import clip, list_names, quote
from llm.base.types import JsonObject
from llm.calls.arguments import adapters_of, with_inside
from llm.calls.flow import Entry, Flow, prompts_at_once
from llm.engine.interrupt import InterruptGuard
from llm.engine.output import PromptState, output_without_run
from llm.engine.progress import Progress, check_use_tqdm
from llm.engine.rows import ON_TOO_LONG, AnyRow, RefusedRow, Row
from llm.errors import (
    GenerationInterrupted,
    JobError,
    JobInterrupted,
    LLMError,
    LogitsProcessorError,
    OutOfMemoryError,
    ValidationError,
    is_out_of_memory,
)
from llm.inputs import LoRARequest
from llm.inside.capture import Capture
from llm.inside.request import CAPTURE, has_inside_args, resolve
from llm.jobs.identity import check_finished, check_recordable, digest_of, identity_of, rows_key, sum_of, write_finished
from llm.jobs.journal import Ended, Journal, Partials, RowRecord, RowRecords
from llm.jobs.requests import (
    BatchRows,
    BatchVectors,
    JobAdapters,
    PlainForm,
    PlainRows,
    PlainVectors,
    is_batch,
    num_prompts,
    template_columns,
)
from llm.jobs.rows import Maker, Replies, Rows, by_index, fault_of, row_error
from llm.jobs.shard import Shard
from llm.jobs.tables import (
    ACTIVATION_FORMATS,
    Columns,
    Form,
    Read,
    check_activations,
    read_file,
    read_rows,
    suffix_of,
    write_activations,
    write_rows,
)
from llm.output_formats import params_as_json, plain
from llm.outputs import RequestOutput
from llm.pooling_params import PoolingParams
from llm.progress import UseTqdm
from llm.runner.pooler import PoolingPlan
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.llm import LLM

logger = logging.getLogger("llm")


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
        finished: of the job, once it is finished; see `llm.jobs.identity`.
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
    capture_to: Path | None = None
    capture_format: str = ""

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

    def __init__(self, llm: LLM, plan: JobPlan, journal: Journal, use_tqdm: UseTqdm) -> None:
        self._llm = llm
        self._plan = plan
        self._journal = journal
        self._running: dict[int, _Running] = {}  # by index
        self._keys = sum_of([])
        self._replies = Replies(llm._preprocessor)
        self._partials = Partials(journal, self._key_of)
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
            except (MemoryError, RuntimeError, OSError, OutOfMemoryError) as error:
                cause = error.__cause__ if isinstance(error, OutOfMemoryError) else error
                if cause is None or isinstance(cause, LLMError) or not is_out_of_memory(cause):
                    raise
                said = clip(str(cause).strip() or type(cause).__name__)
                raise OutOfMemoryError(
                    f"the machine is out of memory ({said}); what the journal {self._journal.path} has is kept, so run "
                    "the job again with resume=True, and with fewer rows at once (max_num_seqs) or more memory."
                ) from error
            finally:
                guard.end()
                if self._flow is not None:
                    self._partials.write(self._flow.in_flight())
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
        answers = RowRecords(self._journal.records(self._journal.end))
        for keyed in keyed_rows(self._llm, self._plan):
            yield [
                row
                for place, key, own in keyed
                if not self._is_answered(key, own, answers.take(own[0].index), place)
                for row in own
            ]

    def _is_answered(self, key: str, rows: Sequence[AnyRow], known: RowRecord | None, place: str) -> bool:
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
        if self._plan.capture_to is not None:
            write_activations(output, self._plan.capture_to, self._plan.capture_format)
        del self._running[output.index]
        self._partials.written.pop(output.index, None)
        self._journal.add(ended.record())
        self._journal.flush()
        self._count.done += 1

    def _note_pooled(self, state: PromptState) -> None:
        self._running[state.row.index].pooled[id(state.row)] = state.completions[0].request.pooled

    def _after_step(self, flow: Flow) -> None:
        self._progress.update()
        self._partials.after_step(flow.in_flight)

    def _key_of(self, index: int) -> str | None:
        running = self._running.get(index)
        return None if running is None else running.key

    def _answered(self) -> Iterator[JsonObject]:
        """The rows of the output."""
        plan, answers = self._plan, RowRecords(self._journal.records(self._journal.end))
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


def keyed_rows(llm: LLM, plan: JobPlan) -> Iterator[list[tuple[str, str, Sequence[AnyRow]]]]:
    """The rows of the file in batches: the place of each, its key, and what it is for the engine."""
    maker, numbered = Maker(plan.rows, plan.on_too_long, plan.shard.count), plan.numbered()
    while batch := _next(numbered, prompts_at_once(llm)):
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


def _next(numbered: Iterator[tuple[int, Read]], room: int) -> list[tuple[int, Read]]:
    """The next rows, that have about `room` prompts."""
    batch: list[tuple[int, Read]] = []
    while room > 0 and (item := next(numbered, None)) is not None:
        batch.append(item)
        room -= num_prompts(item[1].row)
    return batch


# --- From arguments to a plan. ---

_MAX_LISTED = 10


@dataclass(frozen=True)
class RunOptions:
    """The arguments of `LLM.run` but its files, checked."""

    column: str | None = None
    template: str | None = None
    resume: bool = False
    shard: str | None = None
    on_error: str = "return"
    on_too_long: str = "error"
    row_params: bool = False
    use_tqdm: UseTqdm = True
    image_column: str | None = None
    video_column: str | None = None
    capture: Capture | None = None
    capture_to: Path | None = None
    capture_format: str = "safetensors"

    def __post_init__(self) -> None:
        self._check_capture()
        check_flag("resume", self.resume)
        check_flag("row_params", self.row_params)
        check_choice("on_error", self.on_error, ("raise", "return"))
        check_choice("on_too_long", self.on_too_long, ON_TOO_LONG)
        check_use_tqdm(self.use_tqdm)
        if self.template is not None:
            template_columns(self.template)
        if self.column is not None and self.template is not None:
            refuse("template", self.template, "None where column is given")

    def _check_capture(self) -> None:
        if (self.capture is None) != (self.capture_to is None):
            given, missing = ("capture", "capture_to") if self.capture_to is None else ("capture_to", "capture")
            refuse(missing, None, f"given with {given}: activations of a job go into a folder")
        check_choice("capture_format", self.capture_format, tuple(ACTIVATION_FORMATS))
        if self.capture_format == "arrow":
            optional_package("pyarrow", "arrow")
        if self.capture is not None and not isinstance(self.capture, Capture):
            refuse("capture", self.capture, "a Capture")
        if self.capture is not None and callable(self.capture.positions):
            refuse("positions", self.capture.positions, "no callable: a journal cannot record it")


@dataclass(frozen=True)
class JobFiles:
    """Input and output, checked; `target` is this shard's part of the output."""

    source: Path
    target: Path
    shard: Shard

    @classmethod
    def of(cls, source: str | Path, output: str | Path, options: RunOptions) -> JobFiles:
        source, whole, shard = Path(source), Path(output), Shard.of(options.shard)
        suffix_of(source)
        suffix_of(whole)
        if not source.is_file():
            raise JobError(f"{source} is no file; pass the path of the input.")
        if whole.resolve() == source.resolve() or (whole.exists() and whole.samefile(source)):
            raise JobError(f"{whole} is the input; the output must be another file.")
        if not whole.parent.is_dir():
            raise JobError(f"{whole.parent} is no folder; make it, or choose another place for the output.")
        files = cls(source, shard.path(whole), shard)
        if not options.resume and files.target.exists():
            raise JobError(f"{files.target} exists and is complete; delete it to answer the rows again.")
        if not options.resume and files.journal.exists():
            raise JobError(
                f"{files.journal} is of a run that has not ended; pass resume=True (--resume) to go on, or delete it "
                "to start again."
            )
        return files

    @property
    def journal(self) -> Path:
        return self.target.with_name(f"{self.target.name}.journal")


@dataclass(frozen=True)
class JobDefaults:
    """What the rows of a job ask for where they do not say.

    Attributes:
        sampling: of a model that generates.
        pooling, plan: of one that pools; `plan` is None where the model generates.
    """

    sampling: SamplingParams
    pooling: PoolingParams
    plan: PoolingPlan | None
    adapters: JobAdapters

    @classmethod
    def of(
        cls,
        plan: PoolingPlan | None,
        sampling: SamplingParams | None,
        pooling: PoolingParams | None,
        adapters: JobAdapters,
        default: Callable[[], SamplingParams],
    ) -> JobDefaults:
        """Raises `ValidationError` for params that are not the model's."""
        if plan is not None and sampling is not None:
            refuse("sampling_params", type(sampling).__name__, "None: the model pools; pass pooling_params")
        if plan is None and pooling is not None:
            refuse("pooling_params", type(pooling).__name__, "None: the model generates; pass sampling_params")
        if sampling is not None:
            check_recordable(sampling)
        return cls(sampling or default(), pooling or PoolingParams(), plan, adapters)

    def rows(self, first: JsonObject, options: RunOptions, suffix: str, folder: Path) -> Rows:
        """The form of a file's rows, by the first one; `suffix`: of the output."""
        if self.plan is not None and options.on_too_long.startswith("truncate"):
            right = "'error' or 'skip' for a model that pools; PoolingParams(truncate_prompt_tokens=-1) cuts texts"
            refuse("on_too_long", options.on_too_long, right)
        adapters = self.adapters
        if is_batch(first):
            if suffix == ".parquet":
                raise JobError("the answers of OpenAI's batch format are objects of many forms; write a .jsonl file.")
            for name in ("column", "template", "row_params", "image_column", "video_column"):
                if getattr(options, name):
                    refuse(
                        name, getattr(options, name), "None for OpenAI's batch format, whose bodies have the prompts"
                    )
            if self.plan is None:
                return BatchRows(params=self.sampling, adapters=adapters)
            return BatchVectors(params=self.pooling, plan=self.plan, adapters=adapters)
        column, template, row_params = options.column, options.template, options.row_params
        if self.plan is not None:
            found = PlainVectors.of(
                first,
                self.plan,
                self.pooling,
                adapters,
                column,
                template,
                row_params,
                options.image_column,
                options.video_column,
                folder,
            )
            if found.task == "score" and found.media_columns():
                refuse("image_column", found.media_columns()[0], "None for pairs of texts")
            return found
        return PlainRows(
            params=self.sampling,
            adapters=adapters,
            column=column,
            template=template,
            row_params=row_params,
            image_column=options.image_column,
            video_column=options.video_column,
            folder=folder,
        )


def run_job(
    llm: LLM,
    source: str | Path,
    output: str | Path,
    options: RunOptions,
    sampling_params: SamplingParams | None,
    pooling_params: PoolingParams | None,
    lora_modules: Mapping[str, str | Path] | None,
    lora_request: LoRARequest | None,
) -> JobSummary:
    """Check the whole input, then run what is left to do. Adapters that cannot be used are refused first.

    Raises:
        JobError, ValidationError: a file, a row's form or an argument is wrong.
        JobInterrupted: Ctrl-C or SIGTERM.
    """
    model = str(llm._args.model)
    adapters = JobAdapters.of(lora_modules, lora_request, (Path(model).name, model))
    with llm._exclusive():
        adapters_of(llm._begin(), adapters.all(), len(adapters.all()))
    default = llm.get_default_sampling_params
    defaults = JobDefaults.of(llm._pooling, sampling_params, pooling_params, adapters, default)
    defaults = _with_capture(llm, defaults, options)
    files = JobFiles.of(source, output, options)
    identity = identity_of(llm)
    first = _first_row(files.source)
    rows = defaults.rows(first, options, suffix_of(files.target), files.source.parent)
    count, columns, schema = _check_input(files, rows, options.on_error == "raise")
    of_job = {**identity, "input": files.source.suffix, "shard": files.shard.name}
    plan = JobPlan(
        source=files.source,
        target=files.target,
        rows=rows,
        shard=files.shard,
        count=count,
        columns=columns,
        schema=schema,
        on_too_long=options.on_too_long,
        identity=identity,
        finished={**of_job, **_job_params(files, options, defaults)},
        model=Path(model).name,
        capture_to=options.capture_to,
        capture_format=options.capture_format,
    )
    if files.target.exists():  # and resume=True
        return _summary_of_complete(llm, plan)
    with closing(Journal(files.journal, of_job)) as journal:
        summary = Job(llm, plan, journal, options.use_tqdm).run()
        journal.delete()
    return summary


def _with_capture(llm: LLM, defaults: JobDefaults, options: RunOptions) -> JobDefaults:
    """What rows ask for, with the job's capture among it; its folder is made."""
    if options.capture is None or options.capture_to is None:
        if has_inside_args(defaults.sampling.extra_args):
            refuse(
                "extra_args",
                sorted(defaults.sampling.extra_args or {}),
                "without 'capture'; pass capture and capture_to",
            )
        return defaults
    if defaults.plan is not None:
        refuse("capture", options.capture, "None for a model that pools")
    asked = resolve({CAPTURE: options.capture}, llm._open_engine().runner.sites())
    logger.info("activations take up to %s bytes for each position of a row", f"{asked.max_bytes(1, 1):,}")
    try:
        options.capture_to.mkdir(parents=True, exist_ok=options.resume)
        check_activations(options.capture_to, options.capture_format)
    except OSError as error:
        said = "exists; delete it, or pass resume=True" if isinstance(error, FileExistsError) else str(error.strerror)
        raise JobError(f"the folder capture_to={options.capture_to} {said}.") from error
    params = with_inside(defaults.sampling, options.capture, None, lambda: defaults.sampling)
    if not isinstance(params, SamplingParams):
        raise RuntimeError("the params of a job are one SamplingParams")
    return replace(defaults, sampling=params)


def _job_params(files: JobFiles, options: RunOptions, defaults: JobDefaults) -> JsonObject:
    """What a finished output says of the rows that it answers, by name."""
    params = params_as_json(defaults.sampling) if defaults.plan is None else plain(defaults.pooling)
    return {
        "input_sha256": digest_of(files.source),
        "sampling_params" if defaults.plan is None else "pooling_params": params,
        "column": options.column,
        "template": options.template,
        "on_too_long": options.on_too_long,
        "row_params": options.row_params,
        **{
            name: getattr(options, name)
            for name in ("image_column", "video_column")
            if getattr(options, name) is not None
        },
    }


def _summary_of_complete(llm: LLM, plan: JobPlan) -> JobSummary:
    """Of an output that an earlier run has completed.

    Raises:
        JobError: it is of another job.
    """
    has_error = [bool(row.get("error")) for row in read_rows(plan.target)]
    if len(has_error) != plan.count:
        raise JobError(
            f"{plan.target} is complete and has {len(has_error)} rows, and this input asks for {plan.count}; delete it "
            "to answer them, or name another output."
        )
    check_finished(
        plan.target,
        plan.finished,
        lambda: sum_of([key for keyed in keyed_rows(llm, plan) for _, key, _ in keyed]),
    )
    return JobSummary(plan.target, plan.count, plan.count, sum(has_error), 0, 0, 0.0)


def _first_row(source: Path) -> JsonObject:
    """The first row that is not damaged; raises `JobError` if there is none."""
    fault = None
    for read in read_file(source):
        if read.fault is None:
            return read.row
        fault = fault or f"{source} has no row that can be read; {read.place}: {read.fault}."
    raise JobError(fault or f"{source} has no rows.")


def _check_input(files: JobFiles, rows: Rows, strict: bool) -> tuple[int, list[str] | None, object]:
    """Check the form of every row of the whole input.

    With `strict`, rows that could not be answered are refused. Memory: 8 bytes per row, for their ids.

    Returns:
        How many rows the shard has; and of a table that is written, its columns, and Parquet's schema.

    Raises:
        JobError: most rows are bad, two have one id, or the table cannot hold them.
    """
    bad: list[str] = []
    unused: dict[str, None] = {}
    faults: list[str] = []  # the first
    num_faults, hashes, count, total = 0, array("Q"), 0, 0
    suffix = suffix_of(files.target)
    forms: dict[str, Form] = {}
    columns = None if suffix == ".jsonl" else Columns(suffix)
    for total, read in enumerate(read_file(files.source), 1):
        fault = fault_of(rows, read)
        if fault is not None:
            num_faults += 1
            faults = faults or [fault]
        elif (name := rows.identifier(read.row)) is not None:
            hashes.append(_hash(name))
        if strict and len(bad) < _MAX_LISTED:
            bad += [fault] if fault is not None else _problem(rows, read)
        if isinstance(rows, PlainForm) and not rows.row_params:
            unused.update(dict.fromkeys(rows.param_columns(read.row)))
        if columns is not None and isinstance(rows, PlainForm):
            forms |= rows.forms(read.row)
            columns.add(read.row)
        count += (total - 1) % files.shard.count == files.shard.index
    if bad:
        raise ValidationError(f"{files.source}: {'; '.join(bad)}.", parameter="input")
    if num_faults * 2 > total:
        raise JobError(f"{files.source}: {num_faults} of {total} rows are bad, the first in {faults[0]}.")
    _check_distinct(files.source, rows, hashes)
    if unused:
        logger.warning(
            "the input has columns with the names of parameters (%s), which are copied and set nothing; "
            "row_params=True (--row-params) makes them parameters of their rows.",
            list_names(unused),
        )
    if columns is None or not isinstance(rows, PlainForm):
        return count, None, None
    for name in forms:  # a damaged row may have one of them
        columns.names.pop(name, None)
    return count, [*columns.names, *forms], columns.schema(forms)


def _problem(rows: Rows, read: Read) -> list[str]:
    try:
        rows.request(read.row)
    except Exception as error:
        return [f"{read.place}: {str(row_error(error)).rstrip('.')}"]
    return []


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _check_distinct(source: Path, rows: Rows, hashes: array[int]) -> None:
    """Raise `JobError` if two rows have one id. Equal hashes are only a suspicion: those rows are read again."""
    values = np.sort(np.frombuffer(hashes, dtype=np.uint64)) if hashes else np.zeros(0, dtype=np.uint64)
    suspects = set(values[1:][values[1:] == values[:-1]].tolist())
    seen: dict[str, str] = {}
    for read in read_file(source) if suspects else ():
        name = None if fault_of(rows, read) is not None else rows.identifier(read.row)
        if name is None or _hash(name) not in suspects:
            continue
        if name in seen:
            raise JobError(f"{source}: {seen[name]} and {read.place} have the same custom_id, {quote(name)}.")
        seen[name] = read.place
