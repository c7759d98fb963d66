"""The files of a job, row by row: JSONL, CSV and Parquet; and a file for each row's activations, whole or not there.

Tables are read and written in constant memory. pyarrow is imported for Parquet and Arrow alone.

A safetensors file of activations has an array by site, and its positions by "SITE.positions"; of several completions
with "completion1." and so on before the names. An Arrow file is a table with a record for each position: row,
completion, position, and a column for each site, null where the site was not captured there.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TextIO

import numpy as np
from safetensors.numpy import save_file

from llm.base.optional import optional_package
from llm.base.system import replace, whole_file
from llm.base.text import clip, quote, show
from llm.base.types import JsonObject
from llm.errors import JobError
from llm.inside.capture import Activations
from llm.outputs import RequestOutput

# The type of a column: of a text or a number, a list of one form, a struct of named ones.
Form = type | list["Form"] | dict[str, "Form"]
SUFFIXES = (".jsonl", ".csv", ".parquet")
_PARQUET_ROWS = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")
# Of csv and of pyarrow: a value does not fit its column.
_UNFIT = (ValueError, TypeError, NotImplementedError, OverflowError)
_MOST_LINES = 100_000  # of a row of CSV
# The most characters of a CSV field: Python's own limit is 128 KiB.
csv.field_size_limit(1 << 28)


def suffix_of(path: Path) -> str:
    suffix = ".jsonl" if path.suffix == ".ndjson" else path.suffix
    if suffix not in SUFFIXES:
        raise JobError(f"{path} must end in {', '.join(SUFFIXES)}; that says what is in it.")
    return suffix


class Read(NamedTuple):
    """A row of a file.

    Attributes:
        place: "line 7", as editors count, or "row 6" of Parquet, from 0.
        row: if it is damaged, what of it could be read.
        fault: what is wrong with it; None: nothing.
    """

    place: str
    row: JsonObject
    fault: str | None = None


def read_file(path: Path) -> Iterator[Read]:
    """The rows of a file, damaged ones too.

    Raises:
        JobError: it is missing, or cannot be read at all.
    """
    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        else:
            yield from _read_jsonl(path) if suffix == ".jsonl" else _read_csv(path)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_rows(path: Path) -> Iterator[JsonObject]:
    """The rows of a file, as dicts.

    Raises:
        JobError: it is missing, or a row is damaged; the message has its line.
    """
    for place, row, fault in read_file(path):
        if fault is not None:
            raise JobError(f"{path}, {place}: {fault}.")
        yield row


def _open_text(path: Path, newline: str | None) -> TextIO:
    """Bytes that are not UTF-8 are found by `_is_utf8`, in the line that has them."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _is_utf8(text: str) -> bool:
    return text.isascii() or _SURROGATE.search(text) is None


def _read_jsonl(path: Path) -> Iterator[Read]:
    with _open_text(path, None) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row, fault = _json_row(line)
                yield Read(f"line {number}", row, fault)


def _json_row(line: str) -> tuple[JsonObject, str | None]:
    if not _is_utf8(line):
        return {}, "this is not UTF-8"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"this is not JSON ({error})"
    return (row, None) if isinstance(row, dict) else ({}, f"a row must be an object, got {show(row)}")


class _Lines(Iterator[str]):
    """The lines of a CSV file, of which some can be given back.

    Attributes:
        taken: of the row that is being read.
        number: of its first line.
    """

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._back: deque[str] = deque()
        self.taken: list[str] = []
        self.number = 1

    def __next__(self) -> str:
        line = self._back.popleft() if self._back else next(self._file)
        self.taken.append(line)
        if len(self.taken) > _MOST_LINES:
            raise JobError(f"{self._path}, line {self.number}: a quote is opened here that is never closed.")
        return line

    def next_row(self, keep: int | None = None) -> None:
        """Begin a row after the first `keep` lines of this one; None: after all."""
        keep = len(self.taken) if keep is None else keep
        self._back.extendleft(reversed(self.taken[keep:]))
        self.number += keep
        self.taken = []


def _read_csv(path: Path) -> Iterator[Read]:
    """A line with a wrong quote is a row of its own, so that it takes no line after it along."""
    with _open_text(path, "") as file:
        lines = _Lines(path, file)
        reader, names = csv.reader(lines, strict=True), None
        while True:
            cells, fault = [], None
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                fault = f"this is not CSV ({error})"
            place, is_utf8 = f"line {lines.number}", all(map(_is_utf8, cells))
            lines.next_row(None if fault is None else 1)
            if not cells and fault is None:
                continue
            if names is None:
                names = _header(path, place, cells, fault if is_utf8 else "this is not UTF-8")
                continue
            if len(cells) != len(names):
                fault = fault or f"it has {len(cells)} values for {len(names)} columns"
            yield Read(place, dict(zip(names, map(_as_utf8, cells), strict=False)), fault or _fault_of(is_utf8))


def _fault_of(is_utf8: bool) -> str | None:
    return None if is_utf8 else "this is not UTF-8"


def _header(path: Path, place: str, names: list[str], fault: str | None) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if fault is None and twice is not None:
        fault = f"two columns have the name {quote(twice)}"
    if fault is not None:
        raise JobError(f"{path}, {place}: {fault}.")
    return names


def _as_utf8(text: str) -> str:
    return text if _is_utf8(text) else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _read_parquet(path: Path) -> Iterator[Read]:
    parquet = optional_package("pyarrow.parquet", "arrow")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield Read(f"row {number}", row)
                    number += 1
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise JobError(f"{path} is not Parquet ({error}).") from error


class Columns:
    """The columns of a table's rows, over all of them, and their types where Parquet needs these.

    Args:
        suffix: of the table.
    """

    def __init__(self, suffix: str) -> None:
        self.names: dict[str, None] = {}
        self._batch: list[JsonObject] | None = [] if suffix == ".parquet" else None
        self._types: dict[str, object] = {}

    def add(self, row: JsonObject) -> None:
        self.names.update(dict.fromkeys(row))
        if self._batch is not None:
            self._batch.append(_row(row))
            if len(self._batch) == _PARQUET_ROWS:
                self._infer()

    def schema(self, forms: Mapping[str, Form]) -> object:
        """The Arrow schema, with the columns of `forms` last; None: of CSV.

        Raises:
            JobError: a column has values that no type holds.
        """
        if self._batch is None:
            return None
        self._infer()
        arrow = optional_package("pyarrow", "arrow")
        own = [(name, arrow.string() if arrow.types.is_null(kind) else kind) for name, kind in self._types.items()]
        return arrow.schema([*own, *((name, arrow_type(arrow, form)) for name, form in forms.items())])

    def _infer(self) -> None:
        arrow, parquet = optional_package("pyarrow", "arrow"), optional_package("pyarrow.parquet", "arrow")
        for name in map(_escaped, self.names):
            try:
                found = arrow.array([row.get(name) for row in self._batch or []]).type
                known = self._types.get(name, found)
                both = [arrow.schema([(name, kind)]) for kind in (known, found)]
                unified = arrow.unify_schemas(both, promote_options="permissive")
                parquet.ParquetWriter(io.BytesIO(), unified).close()
            except _UNFIT as error:
                raise JobError(
                    f"Parquet has no type for all values of the column {quote(name)} ({clip(str(error))}); write a "
                    ".jsonl file."
                ) from error
            self._types[name] = unified.field(0).type
        self._batch = []


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], schema: object = None) -> None:
    """Write a whole file, or none.

    Args:
        schema: of Parquet, Arrow's.
    """
    suffix = suffix_of(path)
    try:
        with whole_file(path) as fresh:
            if suffix == ".parquet":
                _write_parquet(fresh, rows, schema)
            else:
                (_write_jsonl if suffix == ".jsonl" else _write_csv)(fresh, rows)
    except OSError as error:
        raise JobError(
            f"{path} cannot be written: {error.strerror or error}; the answers are in the journal, so run the job "
            "again with resume=True when that is repaired."
        ) from error
    except _UNFIT as error:
        instead = f"{path.stem}.jsonl"
        raise JobError(
            f"{path} cannot hold these rows: {clip(str(error))}. Nothing is lost: give the journal the name "
            f"{instead}.journal, and run the job into {instead} with resume=True."
        ) from error


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(_escaped(json.dumps(row, ensure_ascii=False, default=str)) + "\n")


def _escaped(text: str) -> str:
    """With unpaired surrogates, which UTF-8 cannot express, as JSON writes them."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """What is neither text nor a number is written as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for row in rows:
            cells = {_escaped(name): _cell(value) for name, value in row.items()}
            if writer is None:
                writer = csv.DictWriter(file, list(cells))
                writer.writeheader()
            writer.writerow(cells)


def _cell(value: object) -> object:
    if isinstance(value, list | dict | bool):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return _escaped(value) if isinstance(value, str) else value


def _row(row: Mapping[str, object]) -> JsonObject:
    """A row that Parquet can hold."""
    return {_escaped(name): _expressible(value) for name, value in row.items()}


def _expressible(value: object) -> object:
    if isinstance(value, str):
        return _escaped(value)
    if isinstance(value, list):
        return [_expressible(item) for item in value]
    return {_escaped(name): _expressible(item) for name, item in value.items()} if isinstance(value, dict) else value


def _write_parquet(path: Path, rows: Iterable[Mapping[str, object]], schema: object) -> None:
    arrow, parquet = optional_package("pyarrow", "arrow"), optional_package("pyarrow.parquet", "arrow")
    left = iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := [_row(row) for row in islice(left, _PARQUET_ROWS)]:
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


def schema_of(path: Path) -> object:
    """The schema of a Parquet file; None: it is another kind of file."""
    return optional_package("pyarrow.parquet", "arrow").read_schema(path) if path.suffix == ".parquet" else None


def arrow_type(arrow: ModuleType, form: Form) -> object:
    """The Arrow type of a column."""
    if isinstance(form, list):
        return arrow.list_(arrow_type(arrow, form[0]))
    if isinstance(form, dict):
        return arrow.struct([(name, arrow_type(arrow, own)) for name, own in form.items()])
    return {str: arrow.string, int: arrow.int64, float: arrow.float64}[form]()


# Format -> suffix of its files.
ACTIVATION_FORMATS = {"safetensors": ".safetensors", "arrow": ".arrow"}


def write_activations(output: RequestOutput, folder: Path, format: str) -> None:
    """Write the file of a row, ROW.safetensors or ROW.arrow. One without activations, such as a refused row, has none.

    Raises:
        JobError: it cannot be written.
    """
    found = {own.index: own.activations for own in output.outputs if own.activations}
    if not found:
        return
    path = folder / f"{output.index:08}{ACTIVATION_FORMATS[format]}"
    partial = path.with_suffix(".partial")
    try:
        if format == "arrow":
            _write_arrow(output.index, found, partial)
        else:
            save_file(_arrays_of(found, len(output.outputs) > 1), partial)
        replace(partial, path)
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}.") from error


def check_activations(folder: Path, format: str) -> None:
    """Raise `JobError` if a job that is resumed has written files of another format there."""
    for name, suffix in ACTIVATION_FORMATS.items():
        if name != format and any(folder.glob(f"*{suffix}")):
            raise JobError(f"capture_to={folder} has {name} files; resume with capture_format={name!r}.")


def _arrays_of(found: Mapping[int, Activations], numbered: bool) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for index, own in found.items():
        start = f"completion{index}." if numbered else ""
        arrays |= {f"{start}{name}": np.ascontiguousarray(array) for name, array in own.items()}
        arrays |= {f"{start}{name}.positions": array for name, array in own.positions.items()}
    return arrays


def _write_arrow(row: int, found: Mapping[int, Activations], path: Path) -> None:
    arrow = optional_package("pyarrow", "arrow")
    tables = []
    for index, own in found.items():
        places = np.unique(np.concatenate([*own.positions.values()]))
        columns: dict[str, object] = {
            "row": arrow.array(np.full(len(places), row)),
            "completion": arrow.array(np.full(len(places), index)),
            "position": arrow.array(places),
        }
        for name, array in own.items():
            indices = {place: index for index, place in enumerate(own.positions[name].tolist())}
            at = arrow.array([indices.get(place) for place in places.tolist()], arrow.int64())
            columns[name] = _column(arrow, array, at, is_tensor=not name.endswith(".pattern"))
        tables.append(arrow.table(columns))
    table = arrow.concat_tables(tables)
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _column(arrow: ModuleType, array: np.ndarray, at: object, is_tensor: bool) -> object:
    """The rows of `array` in these places, null where there is none: tensors of one shape, or a list for each head of
    an attention pattern, whose length is another for each prompt."""
    flat = arrow.array(np.ascontiguousarray(array).reshape(-1))
    if not is_tensor:
        ends = arrow.array(np.arange(0, array.size + 1, array.shape[2], dtype=np.int32))
        return arrow.FixedSizeListArray.from_arrays(arrow.ListArray.from_arrays(ends, flat), array.shape[1]).take(at)
    rows = arrow.FixedSizeListArray.from_arrays(flat, int(np.prod(array.shape[1:]))).take(at)
    return arrow.ExtensionArray.from_storage(arrow.fixed_shape_tensor(flat.type, array.shape[1:]), rows)
