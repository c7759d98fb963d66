"""What job a finished output is of: `OUTPUT.job` beside it, JSON.

Owns the file. It has what an unfinished journal has, and what the rows asked for, so that `resume=True` returns the
answers of this job and of no other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llm.base.disk import sync
from llm.base.types import JsonObject
from llm.errors import JobError
from llm.jobs.journal import difference

_VERSION = 1
_MOST_BYTES = 1 << 24
# Shards of one job differ in these.
_OF_SHARD = ("shard", "rows")


def path_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.job")


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def write_finished(output: Path, identity: Mapping[str, object]) -> None:
    """Written before the output appears: no output is without it."""
    path = path_of(output)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(json.dumps({"job": _VERSION, "identity": identity}, indent=1) + "\n", encoding="utf-8")
        sync(fresh)
        fresh.replace(path)
    except OSError as error:
        raise JobError(
            f"{path} cannot be written: {error.strerror or error}; the answers are in the journal, so run the job "
            "again with resume=True when that is repaired."
        ) from error


def read_finished(output: Path) -> JsonObject | None:
    """The identity of a finished output; None: there is no such file.

    Raises:
        JobError: it is not one of these.
    """
    path = path_of(output)
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        found = None
    identity = found.get("identity") if isinstance(found, dict) and found.get("job") == _VERSION else None
    if not isinstance(identity, dict):
        raise JobError(f"{path} does not say of what job {output} is; delete both to answer the rows again.")
    return identity


def check_finished(output: Path, identity: Mapping[str, object], rows: Callable[[], str]) -> None:
    """Raise `JobError` if a finished output is of another job, or nothing says of which.

    Args:
        identity: without `rows`.
        rows: the key of all rows, asked for if nothing else differs.
    """
    before = read_finished(output)
    if before is None:
        raise JobError(
            f"{output} is complete, and {path_of(output).name}, which says of what job, is not beside it; delete the "
            "output to answer the rows again, or name another one."
        )
    key = before.pop("rows", None)
    differs = difference(before, identity)
    if differs is None and key != rows():
        differs = "its rows have other tokens, parameters or adapters"
    if differs is not None:
        raise JobError(
            f"{output} is complete and of another job: {differs}; delete it to answer the rows again, or name another "
            "output."
        )


def merge_finished(parts: Sequence[Path], output: Path) -> None:
    """Write what job the output of all parts is of, if each has said so.

    Raises:
        JobError: they are of several jobs.
    """
    found = [read_finished(part) for part in parts]
    first = found[0]
    if first is None or None in found:
        return
    own = {name: value for name, value in first.items() if name not in _OF_SHARD}
    for part, other in zip(parts, found, strict=True):
        differs = difference(own, {name: value for name, value in (other or {}).items() if name not in _OF_SHARD})
        if differs is not None:
            raise JobError(f"{part.name} is of another job than {parts[0].name}: {differs}; run that shard again.")
    write_finished(output, {**own, "shard": None, "rows": sum_of([str((other or {}).get("rows")) for other in found])})


def sum_of(keys: Sequence[str]) -> str:
    """One key of all rows: the sum of theirs, so that those of shards can be added."""
    try:
        return f"{sum(int(key, 16) for key in keys) % (1 << 256):064x}"
    except ValueError:
        raise JobError("a .job file of a part is damaged; run that shard again.") from None
