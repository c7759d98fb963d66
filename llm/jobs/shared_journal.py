"""Journals in one folder, one of each process that answers rows of a job.

Owns the folder. Every process appends to its own file and reads those of all, so that what a process had answered when
it was killed is not computed again by another. Memory: about 200 bytes per row that has ended.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from llm.base.types import JsonObject
from llm.errors import JobError
from llm.jobs.answers import Answer, Ended
from llm.jobs.journal import Journal, check_header, read_line

_SUFFIX = ".journal"


class SharedJournal:
    """The journals of a folder, which is made if it is missing.

    Args:
        identity: of the model; see `llm.jobs.identity`.

    Raises:
        JobError: a journal is of another model or setting, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, object]) -> None:
        self._folder, self._identity = Path(folder), identity
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(f"{folder} cannot be made ({error.strerror}); choose another place.") from error
        name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._own = Journal(self._folder / name, identity)
        self._read: dict[Path, int] = {}  # how far
        self._ended: dict[str, tuple[Path, int]] = {}  # by key, where its record is
        self._unfinished: dict[str, Answer] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since the last time."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path not in self._read:
                check_header(path, self._identity)
            self._read[path] = self._read_on(path, self._read.get(path, 0))

    def answer(self, key: str) -> Answer | None:
        """What is known of a row."""
        place = self._ended.get(key)
        if place is None:
            return self._unfinished.get(key)
        path, offset = place
        with path.open("rb") as file:
            file.seek(offset)
            record = read_line(path, f"byte {offset}", file.readline())
        if record is None or record.get("k") != key or "o" not in record:
            raise JobError(f"the journal {path} has changed while it was used; delete it to compute its rows again.")
        return Answer(key, record["o"])

    def keep(self, ended: Ended) -> None:
        self._own.add(ended.record())

    def add(self, record: JsonObject) -> None:
        self._own.add(record)

    def flush(self, sync: bool = False) -> None:
        self._own.flush(sync)

    def close(self) -> None:
        self._own.flush(sync=True)
        self._own.close()

    def _read_on(self, path: Path, start: int) -> int:
        """Where the whole lines of the file end."""
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written, or was torn
                record = read_line(path, f"byte {start}", line)
                if record is not None and "k" in record:
                    self._note(record, path, start)
                start += len(line)
        return start

    def _note(self, record: JsonObject, path: Path, offset: int) -> None:
        key = record["k"]
        if "o" in record:
            self._ended[key] = path, offset
            self._unfinished.pop(key, None)
        elif key not in self._ended:
            self._unfinished.setdefault(key, Answer(key)).extend(record["p"])
