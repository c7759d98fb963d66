"""Shards: the parts of a job that run in several processes, and putting their outputs together.

Row i of n shards' input is of shard i % n, so that a merge needs no index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llm.base.types import JsonObject
from llm.errors import JobError, ValidationError
from llm.jobs.identity import merge_finished
from llm.jobs.tables import read_rows, schema_of, write_rows


@dataclass(frozen=True)
class Shard:
    """One of `count` shards; `index` counts from 0."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, text: object) -> Shard:
        """From "3/16", the fourth of sixteen; "auto": as whoever started this process says; None: the whole job."""
        if text is None:
            return cls()
        if text == "auto":
            return cls(*launched(os.environ))
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text) if isinstance(text, str) else None
        if found is None or not int(found[1]) < int(found[2]):
            raise ValidationError(
                f"shard must be 'i/n' with i from 0 to n-1, or 'auto', got {text!r}.", parameter="shard", value=text
            )
        return cls(int(found[1]), int(found[2]))

    @property
    def name(self) -> str | None:
        """As `of` reads it; None: the whole job."""
        return None if self.count == 1 else f"{self.index}/{self.count}"

    def path(self, output: Path) -> Path:
        """Where this shard's part of `output` goes."""
        if self.count == 1:
            return output
        return output.with_name(f"{output.stem}.shard-{self.index}-of-{self.count}{output.suffix}")


def launched(environment: Mapping[str, str]) -> tuple[int, int]:
    """(index, count) of this process among those that were started together: by torchrun, SLURM or Kubernetes.

    A SLURM array of jobs with several tasks each counts all tasks of all jobs.

    Raises:
        ValidationError: nothing says it, or half of it is missing.
    """
    if "RANK" in environment:
        return _pair(environment, "RANK", "WORLD_SIZE")
    if "SLURM_ARRAY_TASK_ID" in environment or "SLURM_PROCID" in environment:
        job, jobs, task, tasks = 0, 1, 0, 1
        if "SLURM_ARRAY_TASK_ID" in environment:
            job, jobs = _pair(environment, "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
        if "SLURM_PROCID" in environment:
            task, tasks = _pair(environment, "SLURM_PROCID", "SLURM_NTASKS")
        return job * tasks + task, jobs * tasks
    if "JOB_COMPLETION_INDEX" in environment:
        return _pair(environment, "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")
    raise ValidationError(
        "shard='auto' finds none of RANK, SLURM_PROCID, SLURM_ARRAY_TASK_ID and JOB_COMPLETION_INDEX, by which "
        "torchrun, SLURM and Kubernetes number processes; pass 'i/n'.",
        parameter="shard",
    )


def _pair(environment: Mapping[str, str], index_name: str, count_name: str) -> tuple[int, int]:
    index, count = _number(environment, index_name), _number(environment, count_name)
    if index_name == "SLURM_ARRAY_TASK_ID":  # an array may be 1-16, or 0-30:2
        first = _number(environment, "SLURM_ARRAY_TASK_MIN", "0")
        index = (index - first) // max(1, _number(environment, "SLURM_ARRAY_TASK_STEP", "1"))
    if not 0 <= index < count:
        raise ValidationError(
            f"shard='auto' needs {index_name} from 0 to {count_name}-1, got {index} of {count}.", parameter="shard"
        )
    return index, count


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        hint = " (Kubernetes does not set it: give it the value of spec.completions in the manifest)"
        raise ValidationError(
            f"shard='auto' needs {name}, a number{hint if name == 'JOB_COMPLETIONS' else ''}, got {text!r}.",
            parameter="shard",
            value=text,
        )
    return int(text)


def merge(output: Path) -> int:
    """Put the parts of `output`, which lie beside it, into one file; returns the number of rows.

    The result is the file that one process would have written. The parts stay.

    Raises:
        JobError: there are none, one is missing or not of the same job, or `output` exists.
    """
    if output.exists():
        raise JobError(f"{output} exists; delete it, or merge into another place.")
    count = _count_parts(output)
    paths = [Shard(index, count).path(output) for index in range(count)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise JobError(f"{len(missing)} of {count} parts of {output} are missing, first {missing[0]}; run that shard.")
    merge_finished(paths, output)
    rows = _Interleaved(paths)
    write_rows(output, rows, schema_of(paths[0]))
    return rows.count


def _count_parts(output: Path) -> int:
    pattern = re.compile(re.escape(output.stem) + r"\.shard-\d+-of-(\d+)" + re.escape(output.suffix))
    counts = {int(found[1]) for path in output.parent.iterdir() if (found := pattern.fullmatch(path.name))}
    if len(counts) != 1:
        what = "there are none" if not counts else f"there are parts of {' and of '.join(map(str, sorted(counts)))}"
        raise JobError(f"the parts of {output} are beside it, as {Shard(0, 2).path(output).name}, and {what}.")
    return counts.pop()


class _Interleaved:
    """The rows of all parts, one of each in turn."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self.count = 0

    def __iter__(self) -> Iterator[JsonObject]:
        readers = [read_rows(path) for path in self._paths]
        while True:
            row = next(readers[self.count % len(readers)], None)
            if row is None:
                break
            self.count += 1
            yield row
        left = [path.name for path, reader in zip(self._paths, readers, strict=True) for _ in islice(reader, 1)]
        if left:
            raise JobError(f"{left[0]} has more rows than the parts of its job can have; they are of several jobs.")
