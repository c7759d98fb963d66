"""The journal of a job: an append-only file from which an interrupted job goes on, and what it says of each row.

A line is the CRC-32 of a JSON object and the object:

    {"journal": 1, "identity": {...}}                      the first line: what answers depend on besides their row
    {"i": index, "k": key, "o": output}                    a row has ended
    {"i": index, "k": key, "p": [[start, tokens], ...]}    further tokens of each completion of a row that has not

Records are written after every step of the engine, so that a killed process loses the step it was in. They are
synchronised with the disk once per second, so that a power failure loses a second more. What a crash tore is found by
its checksum: the end of the file is cut off when it is opened again, a damaged line elsewhere is passed over, and the
rows in question are computed again.

`RowRecords` reads the records in the order of the rows, although they were written in the order of ending. As a job
never runs far ahead of its first unfinished row, few records wait for their turn: memory does not grow with the
journal.

In a folder of journals (`SharedJournal`) every process appends to its own file and reads those of all, so that what a
process had answered when it was killed is found by the one that takes over its rows.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, cast

import numpy as np

from llm import errors
from llm.base.system import deletes_open_files, lock, whole_file
from llm.base.text import clip, show
from llm.base.types import JsonObject
from llm.engine.output import PromptState
from llm.engine.rows import Row
from llm.errors import JobError, LLMError
from llm.inputs import LoRARequest
from llm.output_formats import output_as_json
from llm.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput, StructuredOutcome
from llm.sampling_params import SamplingParams

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
                with whole_file(path) as fresh:
                    fresh.write_bytes(encode({"journal": VERSION, "identity": identity}))
            self._file: BinaryIO = path.open("r+b", buffering=0)
        except OSError as error:
            raise JobError(f"the journal {path} cannot be written: {error.strerror}; choose another place.") from error
        try:
            lock(self._file.fileno())
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

    def delete(self) -> None:
        """Delete the file: before the lock is let go, where the system deletes open files."""
        if not deletes_open_files():
            self.close()
        self.path.unlink()

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


@dataclass(frozen=True)
class Ended:
    """A row that has ended.

    Attributes:
        key: see `llm.jobs.identity.row_key`.
        values: what a pooling model made of it, float32 [size]; None: it generated, or has an error.
    """

    key: str
    output: RequestOutput
    values: np.ndarray | None = None

    def record(self) -> JsonObject:
        """The journal's record."""
        record: JsonObject = {"i": self.output.index, "k": self.key, "o": output_as_json(self.output)}
        if self.values is not None:
            record["v"] = base64_of(self.values)
        return record


def base64_of(values: np.ndarray) -> str:
    """float32 in little-endian order, as OpenAI encodes vectors too."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


@dataclass
class RowRecord:
    """What is known of a row.

    Attributes:
        key: of the row; see `llm.jobs.identity.row_key`.
        output: as `llm.output_formats` writes it; None: the row has not ended.
        tokens: of each completion, so far.
        values: of `Ended`, in base64; None: there are none.
    """

    key: str
    output: JsonObject | None = None
    tokens: list[list[int]] = field(default_factory=list)
    values: str | None = None

    def ended(self) -> Ended | None:
        """The row, if it has ended."""
        if self.output is None:
            return None
        values = None if self.values is None else np.frombuffer(base64.b64decode(self.values), dtype="<f4")
        return Ended(self.key, output_from_json(self.output, None), values)

    def continued_by(self, row: Row, vocab_size: int | None = None) -> list[int]:
        """Let a row continue after the tokens that it has; returns how many each completion has.

        Raises:
            JobError: they are not this row's.
        """
        highest = max((token for own in self.tokens for token in own), default=0)
        lowest = min((token for own in self.tokens for token in own), default=0)
        is_known = lowest >= 0 and (vocab_size is None or highest < vocab_size)
        if self.tokens and (len(self.tokens) != row.params.n or not is_known):
            raise JobError(
                f"the journal's record of the row {self.key[:12]} has tokens that are not of this row; delete the "
                "journal to start again."
            )
        row.known_outputs = self.tokens
        return [len(tokens) for tokens in self.tokens]

    def extend(self, parts: list[tuple[int, list[int]]]) -> None:
        """Add the tokens of a record. A part that starts after what is known follows a damaged line: it is left out."""
        if not self.tokens:
            self.tokens = [[] for _ in parts]
        if len(parts) != len(self.tokens):
            raise JobError(
                f"the journal's records of the row {self.key[:12]} are of {len(self.tokens)} and of {len(parts)} "
                "completions; delete the journal to start again."
            )
        for known, (start, tokens) in zip(self.tokens, parts, strict=True):
            if start <= len(known):
                known[start:] = tokens


class RowRecords:
    """The answers of a journal's records, taken by index in increasing order."""

    def __init__(self, records: Iterator[JsonObject]) -> None:
        self._records = records
        self._found: dict[int, RowRecord] = {}

    def take(self, index: int) -> RowRecord | None:
        """What is known of a row; None: nothing. Everything before it is forgotten."""
        while not self._has_ended(index):
            record = next(self._records, None)
            if record is None:
                break
            if record["i"] >= index:
                self._add(record)
        return self._found.pop(index, None)

    def _has_ended(self, index: int) -> bool:
        return index in self._found and self._found[index].output is not None

    def _add(self, record: JsonObject) -> None:
        answer = self._found.setdefault(record["i"], RowRecord(record["k"]))
        if "o" in record:
            answer.key, answer.output, answer.tokens = record["k"], record["o"], []
            answer.values = record.get("v")
        elif answer.output is None:
            answer.extend(record["p"])


# Between two writings of what there is of rows in flight.
PARTIALS_SECONDS = 10.0


class Partials:
    """Writes the further tokens of rows in flight, each token once.

    Args:
        journal: None: nothing is written.
        key_of: a row's index -> its key; None: nothing of it is written.

    Attributes:
        written: by index, the number of tokens of each completion that the journal has.
        due: `time.monotonic()` from which on a step is followed by a writing.
    """

    def __init__(self, journal: Journal | SharedJournal | None, key_of: Callable[[int], str | None]) -> None:
        self.written: dict[int, list[int]] = {}
        self.due = monotonic() + PARTIALS_SECONDS
        self._journal = journal
        self._key_of = key_of

    def after_step(self, in_flight: Callable[[], Iterable[PromptState]]) -> None:
        """Write what there is, if it is time."""
        if self._journal is None or monotonic() < self.due:
            return
        self.write(in_flight())
        self._journal.flush()
        self.due = monotonic() + PARTIALS_SECONDS

    def write(self, states: Iterable[PromptState]) -> None:
        for state in states:
            index = state.row.index
            key = self._key_of(index)
            record = None if key is None else self._record(index, key, state.known_outputs())
            if record is not None and self._journal is not None:
                self._journal.add(record)

    def _record(self, index: int, key: str, tokens: list[list[int]]) -> JsonObject | None:
        """The record of what is new in a row's tokens, None if nothing is."""
        starts = self.written.get(index, [0] * len(tokens))
        if not tokens or [len(own) for own in tokens] == starts:
            return None
        self.written[index] = [len(own) for own in tokens]
        parts = [[start, own[start:]] for start, own in zip(starts, tokens, strict=True)]
        return {"i": index, "k": key, "p": parts}


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
        name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._own = Journal(self._folder / name, identity)
        self._read: dict[Path, int] = {}  # how far
        self._ended: dict[str, tuple[Path, int]] = {}  # by key, where its record is
        self._unfinished: dict[str, RowRecord] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since the last time."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if path not in self._read:
                check_header(path, self._identity)
            self._read[path] = self._read_on(path, self._read.get(path, 0))

    def answer(self, key: str) -> RowRecord | None:
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
        return RowRecord(key, record["o"])

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
            self._unfinished.setdefault(key, RowRecord(key)).extend(record["p"])


def output_from_json(data: JsonObject, params: SamplingParams | None) -> RequestOutput:
    """The output that `output_as_json` wrote, without its metrics; `params` are the prompt's."""
    scores = data.get("prompt_token_id_logprobs")
    return RequestOutput(
        data["request_id"],
        data["prompt"],
        data["prompt_token_ids"],
        [_completion(own, params) for own in data["outputs"]],
        data["finished"],
        data["num_cached_tokens"],
        data["seed"],
        _positions(data["prompt_logprobs"], params is not None and params.flat_logprobs),
        params,
        index=data["index"],
        num_dropped_tokens=data["num_dropped_tokens"],
        prompt_token_id_logprobs=None if scores is None else np.array(scores, dtype=np.float32),
        lora_request=None if data.get("lora_request") is None else LoRARequest(**data["lora_request"]),
    )


# --- Checking what was read. ---

# What `output_as_json` writes: a type, (type or None), [of each], {member: form}. Other members are not looked at.
_ERROR = {"type": str, "message": str}
_TOKEN = {"token_id": int, "logprob": float, "rank": (int,), "decoded_token": (str,)}
_LOGPROBS = ([([_TOKEN],)],)
_COMPLETION = {
    **{"index": int, "text": str, "token_ids": [int], "cumulative_logprob": (float,), "logprobs": _LOGPROBS},
    **{"finish_reason": (str,), "stop_reason": (int, str), "error": (_ERROR,), "structured": (dict,)},
}
_OUTPUT = {
    **{"request_id": str, "index": int, "prompt": (str,), "prompt_token_ids": [int], "outputs": [_COMPLETION]},
    **{"finished": bool, "num_cached_tokens": (int,), "seed": (int,), "prompt_logprobs": _LOGPROBS},
    **{"num_dropped_tokens": int, "params": (dict,), "lora_request": (dict,)},
}


def check_output(data: object) -> None:
    """Raise `ValueError` for data that `output_from_json` cannot read, with the member that is wrong."""
    check_form(data, _OUTPUT, "the output")
    try:
        output_from_json(cast("JsonObject", data), None)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the output cannot be read ({clip(str(error))})") from error


def check_form(value: object, form: object, name: str) -> None:
    """Raise `ValueError` if a value is not of a form, as in the tables above."""
    if isinstance(form, tuple):
        if value is not None and not any(_fits(value, own) for own in form):
            check_form(value, form[0], name)
    elif isinstance(form, list):
        _check_type(value, list, name)
        if not all(type(item) is form[0] for item in cast("list[object]", value)):
            for place, item in enumerate(cast("list[object]", value)):
                check_form(item, form[0], f"{name}[{place}]")
    elif isinstance(form, dict):
        _check_type(value, dict, name)
        for member, own in form.items():
            if member not in cast("JsonObject", value):
                raise ValueError(f"{name} has no {member}")
            check_form(cast("JsonObject", value)[member], own, f"{name}.{member}")
    elif isinstance(form, type):
        _check_type(value, form, name)


def _fits(value: object, form: object) -> bool:
    try:
        check_form(value, form, "")
    except ValueError:
        return False
    return True


def _check_type(value: object, kind: type, name: str) -> None:
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {show(value)}")


def error_from_json(data: JsonObject | None) -> Exception | None:
    """An exception of this package's type of that name, else an `LLMError`."""
    if data is None:
        return None
    kind = getattr(errors, data["type"], LLMError)
    is_known = isinstance(kind, type) and issubclass(kind, LLMError)
    error: Exception = kind(data["message"]) if is_known else LLMError(data["message"])
    vars(error).update({name: value for name, value in data.items() if name not in ("type", "message")})
    return error


def _completion(data: JsonObject, params: SamplingParams | None) -> CompletionOutput:
    structured = data["structured"]
    asked = None if params is None else params.structured_outputs
    is_data = asked is not None and structured is not None and structured["complete"]
    flat = params is not None and params.flat_logprobs
    return CompletionOutput(
        data["index"],
        data["text"],
        data["token_ids"],
        data["cumulative_logprob"],
        _positions(data["logprobs"], flat),
        data["finish_reason"],
        data["stop_reason"],
        error_from_json(data["error"]),
        None if structured is None else StructuredOutcome(**structured),
        asked.parse(data["text"]) if asked is not None and is_data else None,
    )


def _positions(data: list[list[JsonObject] | None] | None, flat: bool) -> Any:
    if data is None:
        return None
    positions = [None if position is None else dict(map(_token, position)) for position in data]
    if not flat:
        return positions
    found = FlatLogprobs()
    for position in positions:
        found.append(position)
    return found


def _token(data: JsonObject) -> tuple[int, Logprob]:
    return data["token_id"], Logprob(data["logprob"], data["rank"], data["decoded_token"])
