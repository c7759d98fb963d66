"""The activations that a job captures: a safetensors file for each row, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from llm.errors import JobError
from llm.outputs import RequestOutput


def write_activations(output: RequestOutput, folder: Path) -> None:
    """Write `ROW.safetensors`: an array by site, and its positions by "SITE.positions"; of several completions with
    "completion1." and so on before the names. A row without activations, such as a refused one, has no file.

    Raises:
        JobError: it cannot be written.
    """
    found: dict[str, np.ndarray] = {}
    for own in output.outputs:
        start = f"completion{own.index}." if len(output.outputs) > 1 else ""
        for name, array in (own.activations or {}).items():
            found[f"{start}{name}"] = np.ascontiguousarray(array)
        if own.activations is not None:
            found |= {f"{start}{name}.positions": array for name, array in own.activations.positions.items()}
    if not found:
        return
    path = folder / f"{output.index:08}.safetensors"
    partial = path.with_suffix(".partial")
    try:
        save_file(found, partial)
        os.replace(partial, path)
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}.") from error
