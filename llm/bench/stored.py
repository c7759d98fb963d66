"""The last calibration of this machine, kept beside the compiled kernels.

Owns the file. It is read only if no other user can write to it, and holds for the same device, cores and threads. What
was measured while other programs ran does not replace what was measured alone.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from llm.base.types import JsonObject
from llm.bench.calibrate import Calibration, Rate, usable_cores
from llm.kernels.state import is_private, private_cache
from llm.platforms import select_platform

_FILE = "calibration.json"
_MOST_BYTES = 1 << 20


def keep(measured: Calibration) -> None:
    """Remember a measurement; where there is no cache folder of this user's alone, nothing."""
    folder = private_cache()
    if folder is None:
        return
    known = _read(folder / _FILE)
    key = _key(measured.device_name, measured.cores, measured.threads)
    before = _calibration(known.get(key))
    if before is not None and measured.warnings() and not before.warnings():
        return
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".calibration-")
        with os.fdopen(handle, "w") as file:
            json.dump({**known, key: asdict(measured)}, file, indent=2)
        os.replace(name, folder / _FILE)
    except OSError:
        return  # it is measured again


def stored() -> Calibration | None:
    """What was measured on this machine with as many cores and threads as now; None: nothing."""
    folder = private_cache()
    if folder is None or not is_private(folder / _FILE):
        return None
    name = select_platform("cpu")[0].get_device_name()
    return _calibration(_read(folder / _FILE).get(_key(name, len(usable_cores()), torch.get_num_threads())))


def _key(device: str, cores: int, threads: int) -> str:
    return f"{device}, {cores} cores, {threads} threads"


def _read(path: Path) -> JsonObject:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _calibration(data: object) -> Calibration | None:
    """None for anything but what `keep` writes."""
    if not isinstance(data, dict):
        return None
    read, gemm = _rate(data.get("read")), _rate(data.get("gemm"))
    other, name = data.get("other_cores"), data.get("device_name")
    counts = [data.get("cores"), data.get("threads")]
    if read is None or gemm is None or not isinstance(name, str) or not isinstance(other, float | None):
        return None
    if not all(type(count) is int for count in counts):
        return None
    return Calibration(name, data["cores"], data["threads"], read, gemm, other)


def _rate(data: object) -> Rate | None:
    if not isinstance(data, dict):
        return None
    best, spread, repeats = data.get("best"), data.get("spread"), data.get("repeats")
    if not isinstance(best, float) or not isinstance(spread, float) or not isinstance(repeats, int):
        return None
    return Rate(best, spread, repeats) if math.isfinite(best) and best > 0 and math.isfinite(spread) else None
