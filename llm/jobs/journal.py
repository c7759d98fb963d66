"""The journal of a job: an append-only file from which an interrupted job goes on.

Owns the file. A line is the CRC-32 of a JSON object and the object:

    {"journal": 1, "identity": {...}}                      the first line: what answers depend on besides their row
    {"i": index, "k": key, "o": output}                    a row has ended
    {"i": index, "k": key, "p": [[start, tokens], ...]}    further tokens of each completion of a row that has not

Records are written after every step of the engine, so that a killed process loses the step it was in. They are
synchronised with the disk once per second, so that a power failure loses a second more. What a crash tore is found by
its checksum: the end of the file is cut off when it is opened again, a damaged line elsewhere is passed over, and the
rows in question are computed again.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from llm.base.disk import sync
from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.errors import JobError
from llm.outputs_read import check_form, check_output

VERSION = 1
_SYNC_SECONDS = 1.0
_MOST_HEADER = 1 << 24  # bytes
_HEAD = 9  # the checksum and a space


def encode(record: Mapping[str, object]) -> bytes:
    body = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


_RECORD = {"i": int, "k": str}


def decode(line: bytes) -> JsonObject | None:
    """The record of a line; None if it is damaged.

    Raises:
        ValueError: its checksum is right, and it is no record.
    """
    body = line[_HEAD:-1]
    if not line.endswith(b"\n") or line[:_HEAD] != b"%08x " % zlib.crc32(body):
        return None
    try:
        record = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"it is {show(record)}")
    if "journal" not in record:
        _check_record(record)
    return record


def read_line(path: Path, place: str, line: bytes) -> JsonObject | None:
    """As `decode`; raises `JobError` with the place of a line that no job wrote."""
    try:
        return decode(line)
    except ValueError as error:
        raise JobError(
            f"{path}, {place}: this is no record of a journal ({clip(str(error))}); delete the journal to start again."
        ) from error


def _check_record(record: JsonObject) -> None:
    check_form(record, _RECORD, "it")
    if record["i"] < 0:
        raise ValueError(f"it.i is {record['i']}")
    if "o" in record:
        check_output(record["o"])
        check_form(record.get("v"), (str,), "it.v")
        if record.get("v") is not None and len(base64.b64decode(record["v"], validate=True)) % 4:
            raise ValueError("it.v is cut off")
        return
    if "p" not in record:
        raise ValueError("it has neither o nor p")
    for part in record["p"] if isinstance(record["p"], list) else [None]:
        if not isinstance(part, list) or len(part) != 2:
            raise ValueError(f"it.p is {show(record['p'])}")
        check_form(part[0], int, "it.p[0]")
        check_form(part[1], [int], "it.p[1]")


class Journal:
    """An open journal, locked against other processes.

    Args:
        identity: what the job's answers depend on besides their rows.

    Raises:
        JobError: the file is no journal, of another model or setting, in use, or cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, object]) -> None:
        self.path = path
        self.num_rows = 0  # ended ones, in this process
        self._synced = monotonic()
        self._buffer: list[bytes] = []
        try:
            if not path.exists():
                _create(path, encode({"journal": VERSION, "identity": identity}))
            self._file: BinaryIO = path.open("r+b", buffering=0)
        except OSError as error:
            raise JobError(f"the journal {path} cannot be written: {error.strerror}; choose another place.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise JobError(f"the journal {path} is in use by another process; wait until it has ended.") from None
        try:
            check_header(path, identity)
            self.end = self._cut_torn_end()
        except BaseException:
            self._file.close()
            raise

    def records(self, end: int | None = None) -> Iterator[JsonObject]:
        """The records up to byte `end`, None: all that were there when the journal was opened or last flushed."""
        end = self.end if end is None else end
        with self.path.open("rb") as file:
            file.readline()
            number = 1
            while file.tell() < end:
                number += 1
                record = read_line(self.path, f"line {number}", file.readline())
                if record is not None:
                    yield record

    def add(self, record: Mapping[str, object]) -> None:
        self._buffer.append(encode(record))

    def flush(self, sync: bool = False) -> None:
        """Write what was added; with `sync`, or once per second, wait until the disk has it."""
        data = b"".join(self._buffer)
        if not data and not sync:
            return
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
            if sync or monotonic() > self._synced + _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = monotonic()
        except OSError as error:
            os.ftruncate(self._file.fileno(), self.end)  # half a line would damage the next one too
            self._file.seek(self.end)
            raise JobError(
                f"the journal {self.path} cannot be written: {error.strerror}; what it has is kept, so run the job "
                "again with resume=True when that is repaired."
            ) from error
        self._buffer.clear()
        self.end = self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _cut_torn_end(self) -> int:
        """Cut off what follows the last whole line; returns the file's size."""
        end = 0
        with self.path.open("rb") as file:
            for number, (start, line) in enumerate(_lines(file), 1):
                if read_line(self.path, f"line {number}", line) is not None:
                    end = start + len(line)
        os.ftruncate(self._file.fileno(), end)
        self._file.seek(end)
        return end


def check_header(path: Path, identity: Mapping[str, object]) -> None:
    """Raise `JobError` if a file is no journal, or one of another model or setting."""
    with path.open("rb") as file:
        header = read_line(path, "line 1", file.readline(_MOST_HEADER))
    if header is None or "journal" not in header:
        raise JobError(f"{path} is not a journal; choose another path, or delete the file.")
    if header["journal"] != VERSION:
        raise JobError(f"the journal {path} has version {show(header['journal'])}, and {VERSION} is read.")
    before = header.get("identity")
    differs = difference(before if isinstance(before, dict) else {}, identity)
    if differs is not None:
        raise JobError(
            f"the journal {path} is of another job: {differs}; run that job, or delete the journal to start again."
        )


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The first thing in which two identities differ; None: they are equal."""
    now = json.loads(json.dumps(now))
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            return f"its {name} is {show(before.get(name))}, and now it is {show(now.get(name))}"
    return None


def _lines(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    start = 0
    for line in file:
        yield start, line
        start += len(line)


def _create(path: Path, header: bytes) -> None:
    """Make the file with its first line, whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)
