"""The files of a job, row by row: JSONL, CSV and Parquet.

Owns reading and writing them in constant memory, and the order of the output's columns. pyarrow is imported for
Parquet alone.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import ModuleType

from llm.base.disk import sync
from llm.base.errors import JobError
from llm.base.optional import optional_package
from llm.base.text import clip, show
from llm.base.types import JsonObject

# The type of a column: of a text or a number, a list of one form, a struct of named ones.
Form = type | list["Form"] | dict[str, "Form"]
SUFFIXES = (".jsonl", ".csv", ".parquet")
_PARQUET_ROWS = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")
# The most characters of a CSV field: Python's own limit is 128 KiB.
csv.field_size_limit(1 << 28)


def suffix_of(path: Path) -> str:
    suffix = ".jsonl" if path.suffix == ".ndjson" else path.suffix
    if suffix not in SUFFIXES:
        raise JobError(f"{path} must end in {', '.join(SUFFIXES)}; that says what is in it.")
    return suffix


def read_rows(path: Path) -> Iterator[JsonObject]:
    """The rows of a file, as dicts.

    Raises:
        JobError: it is missing, or a row is damaged; the message has its line.
    """
    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        else:
            yield from _read_jsonl(path) if suffix == ".jsonl" else _read_csv(path)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not UTF-8: {error.reason}.") from error


def _read_jsonl(path: Path) -> Iterator[JsonObject]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise JobError(f"{path}, line {number}: this is not JSON ({error}).") from error
            if not isinstance(row, dict):
                raise JobError(f"{path}, line {number}: a row must be an object, got {show(row)}.")
            yield row


def _read_csv(path: Path) -> Iterator[JsonObject]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise JobError(f"{path}, line {reader.line_num}: a row must have a value for each of the columns.")
                yield dict(row)
        except csv.Error as error:
            raise JobError(f"{path}, line {reader.line_num}: this is not CSV ({error}).") from error


def _read_parquet(path: Path) -> Iterator[JsonObject]:
    parquet = optional_package("pyarrow.parquet", "arrow")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                yield from batch.to_pylist()
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise JobError(f"{path} is not Parquet ({error}).") from error


def write_rows(
    path: Path, rows: Iterable[Mapping[str, object]], forms: Mapping[str, Form], like: Path | None = None
) -> None:
    """Write a whole file under another name, wait for the disk, and give it its name.

    Args:
        forms: the types of columns that Parquet could not tell from their first values.
        like: a file of the same kind, whose types the columns have.
    """
    fresh, suffix = path.with_name(f".{path.name}.new"), suffix_of(path)
    try:
        if suffix == ".parquet":
            _write_parquet(fresh, rows, forms, like)
        else:
            (_write_jsonl if suffix == ".jsonl" else _write_csv)(fresh, rows)
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise JobError(
            f"{path} cannot be written: {error.strerror or error}; the answers are in the journal, so run the job "
            "again with resume=True when that is repaired."
        ) from error
    except (ValueError, TypeError) as error:  # of csv and of pyarrow: a value does not fit its column
        fresh.unlink(missing_ok=True)
        instead = f"{path.stem}.jsonl"
        raise JobError(
            f"{path} cannot hold these rows: {clip(str(error))}. Nothing is lost: give the journal the name "
            f"{instead}.journal, and run the job into {instead} with resume=True."
        ) from error
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


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


def _write_parquet(
    path: Path, rows: Iterable[Mapping[str, object]], forms: Mapping[str, Form], like: Path | None
) -> None:
    """The first row group decides the types of other columns; one without a value in it is text."""
    arrow, parquet = optional_package("pyarrow", "arrow"), optional_package("pyarrow.parquet", "arrow")
    left, writer = iter(rows), None
    schema = None if like is None else parquet.read_schema(like)
    while batch := [_row(row) for row in islice(left, _PARQUET_ROWS)]:
        schema = schema or _schema(arrow, batch, forms)
        table = arrow.Table.from_pylist(batch, schema=schema)
        if writer is None:
            writer = parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    with closing(writer or parquet.ParquetWriter(path, arrow.schema([]))):
        pass


def _schema(arrow: ModuleType, batch: Sequence[Mapping[str, object]], forms: Mapping[str, Form]) -> object:
    others = [{name: value for name, value in row.items() if name not in forms} for row in batch]
    types = {field.name: field.type for field in arrow.Table.from_pylist(others).schema}
    types = {name: arrow.string() if kind == arrow.null() else kind for name, kind in types.items()}
    types |= {name: arrow_type(arrow, form) for name, form in forms.items()}
    return arrow.schema([(name, types[name]) for name in batch[0]])


def arrow_type(arrow: ModuleType, form: Form) -> object:
    """The Arrow type of a column."""
    if isinstance(form, list):
        return arrow.list_(arrow_type(arrow, form[0]))
    if isinstance(form, dict):
        return arrow.struct([(name, arrow_type(arrow, own)) for name, own in form.items()])
    return {str: arrow.string, int: arrow.int64, float: arrow.float64}[form]()
