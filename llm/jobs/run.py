"""`LLM.run`: from the arguments of a user to a checked plan of a job, and its run.

Owns every check that is made before the first row is computed: the files, each row's form, ids that occur twice.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm.api.flow import FlowHost
from llm.base.bar import UseTqdm
from llm.base.checks import check_choice, check_flag, refuse
from llm.base.text import list_names, quote
from llm.base.types import JsonObject
from llm.engine.boundary import PoolingPlan
from llm.engine.progress import check_use_tqdm
from llm.engine.rows import ON_TOO_LONG
from llm.errors import JobError, ValidationError
from llm.jobs.adapters import JobAdapters
from llm.jobs.finished import check_finished, digest_of, sum_of
from llm.jobs.identity import check_recordable
from llm.jobs.job import Job, JobPlan, JobSummary, keyed_rows
from llm.jobs.journal import Journal
from llm.jobs.making import Rows, fault_of, row_error
from llm.jobs.requests import BatchRows, PlainForm, PlainRows, is_batch, template_columns
from llm.jobs.shard import Shard
from llm.jobs.tables import Columns, Form, Read, read_file, read_rows, suffix_of
from llm.jobs.vectors import BatchVectors, PlainVectors
from llm.outputs_json import params_as_json, plain
from llm.pooling_params import PoolingParams
from llm.sampling_params import SamplingParams

logger = logging.getLogger("llm")

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

    def __post_init__(self) -> None:
        check_flag("resume", self.resume)
        check_flag("row_params", self.row_params)
        check_choice("on_error", self.on_error, ("raise", "return"))
        check_choice("on_too_long", self.on_too_long, ON_TOO_LONG)
        check_use_tqdm(self.use_tqdm)
        if self.template is not None:
            template_columns(self.template)
        if self.column is not None and self.template is not None:
            refuse("template", self.template, "None where column is given")


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
class Asks:
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
    ) -> Asks:
        """Raises `ValidationError` for params that are not the model's."""
        if plan is not None and sampling is not None:
            refuse("sampling_params", type(sampling).__name__, "None: the model pools; pass pooling_params")
        if plan is None and pooling is not None:
            refuse("pooling_params", type(pooling).__name__, "None: the model generates; pass sampling_params")
        if sampling is not None:
            check_recordable(sampling)
        return cls(sampling or default(), pooling or PoolingParams(), plan, adapters)

    def rows(self, first: JsonObject, options: RunOptions, suffix: str) -> Rows:
        """The form of a file's rows, by the first one; `suffix`: of the output."""
        if self.plan is not None and options.on_too_long.startswith("truncate"):
            right = "'error' or 'skip' for a model that pools; PoolingParams(truncate_prompt_tokens=-1) cuts texts"
            refuse("on_too_long", options.on_too_long, right)
        adapters = self.adapters
        if is_batch(first):
            if suffix == ".parquet":
                raise JobError("the answers of OpenAI's batch format are objects of many forms; write a .jsonl file.")
            for name in ("column", "template", "row_params"):
                if getattr(options, name):
                    refuse(
                        name, getattr(options, name), "None for OpenAI's batch format, whose bodies have the prompts"
                    )
            if self.plan is None:
                return BatchRows(params=self.sampling, adapters=adapters)
            return BatchVectors(params=self.pooling, plan=self.plan, adapters=adapters)
        column, template, row_params = options.column, options.template, options.row_params
        if self.plan is not None:
            return PlainVectors.of(first, self.plan, self.pooling, adapters, column, template, row_params)
        return PlainRows(
            params=self.sampling, adapters=adapters, column=column, template=template, row_params=row_params
        )


def run_job(
    llm: FlowHost, files: JobFiles, options: RunOptions, asks: Asks, identity: JsonObject, model: str
) -> JobSummary:
    """Check the whole input, then run what is left to do.

    Raises:
        JobError, ValidationError: a file, a row's form or an argument is wrong.
        JobInterrupted: Ctrl-C or SIGTERM.
    """
    first = _first_row(files.source)
    rows = asks.rows(first, options, suffix_of(files.target))
    count, columns, schema = _check_input(files, rows, options.on_error == "raise")
    of_job = {**identity, "input": files.source.suffix, "shard": files.shard.name}
    plan = JobPlan(
        files.source,
        files.target,
        rows,
        files.shard,
        count,
        columns,
        schema,
        options.on_too_long,
        identity,
        {**of_job, **_asked(files, options, asks)},
        model,
    )
    if files.target.exists():  # and resume=True
        return _summary_of_complete(llm, plan)
    with closing(Journal(files.journal, of_job)) as journal:
        summary = Job(llm, plan, journal, options.use_tqdm).run()
        files.journal.unlink()
    return summary


def _asked(files: JobFiles, options: RunOptions, asks: Asks) -> JsonObject:
    """What a finished output says of the rows that it answers, by name."""
    params = params_as_json(asks.sampling) if asks.plan is None else plain(asks.pooling)
    return {
        "input_sha256": digest_of(files.source),
        "sampling_params" if asks.plan is None else "pooling_params": params,
        "column": options.column,
        "template": options.template,
        "on_too_long": options.on_too_long,
        "row_params": options.row_params,
    }


def _summary_of_complete(llm: FlowHost, plan: JobPlan) -> JobSummary:
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
        rows.asked(read.row)
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
