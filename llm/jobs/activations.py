"""The activations that a job captures: a file for each row, whole or not there.

A safetensors file has an array by site, and its positions by "SITE.positions"; of several completions with
"completion1." and so on before the names. An Arrow file is a table with a record for each position: row, completion,
position, and a column for each site, null where the site was not captured there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
from safetensors.numpy import save_file

from llm.base.optional import optional_package
from llm.errors import JobError
from llm.inside.capture import Activations
from llm.outputs import RequestOutput

# Format -> suffix of its files.
FORMATS = {"safetensors": ".safetensors", "arrow": ".arrow"}


def write_activations(output: RequestOutput, folder: Path, format: str) -> None:
    """Write the file of a row, ROW.safetensors or ROW.arrow. One without activations, such as a refused row, has none.

    Raises:
        JobError: it cannot be written.
    """
    found = {own.index: own.activations for own in output.outputs if own.activations}
    if not found:
        return
    path = folder / f"{output.index:08}{FORMATS[format]}"
    partial = path.with_suffix(".partial")
    try:
        if format == "arrow":
            _write_arrow(output.index, found, partial)
        else:
            save_file(_named(found, len(output.outputs) > 1), partial)
        os.replace(partial, path)
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}.") from error


def check_folder(folder: Path, format: str) -> None:
    """Raise `JobError` if a job that is resumed has written files of another format there."""
    for name, suffix in FORMATS.items():
        if name != format and any(folder.glob(f"*{suffix}")):
            raise JobError(f"capture_to={folder} has {name} files; resume with capture_format={name!r}.")


def _named(found: Mapping[int, Activations], numbered: bool) -> dict[str, np.ndarray]:
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
