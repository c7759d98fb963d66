"""The machine's memory read bandwidth and GEMM rate, measured before anything else, by the best kernels there are.

Every figure is compared with the two rates. A spread between repetitions, or other processes on the same cores, is
warned of. A model that fits into the caches is read faster than from memory, and integers are multiplied faster than
floats: `calibrate_for` measures both as the model has them.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from llm.base import system
from llm.base.types import JsonObject
from llm.engine.boundary import Rates
from llm.kernels.backend import Backend
from llm.kernels.select import backend_for
from llm.kernels.state import is_private, private_cache
from llm.kernels.weight import Weight
from llm.platforms import select_platform
from llm.runner.inspection import ModelCost

# Larger than the caches of most machines; on small machines a share of the free memory.
_READ_BYTES = 1 << 30
_READ_SHARE_OF_FREE = 8
_GEMM_SHAPE = (512, 2048, 2048)
_READ_WIDTH = 4096
_INTEGERS = {"int8": 8, "int4": 4}
_PLAIN = ("bfloat16", "float")
_LEAST_REPEATS = 5
_SPREAD_ALLOWED = 0.1
_CORES_ALLOWED = 0.1
# /proc/stat counts hundredths of a second: shorter spans are meaningless.
_SHORTEST_WATCH_SECONDS = 0.3


@dataclass(frozen=True)
class Rate:
    """A repeated measurement of a rate per second. `spread`: (best - median) / best."""

    best: float
    spread: float
    repeats: int


@dataclass(frozen=True)
class Calibration:
    """The rates of a machine, and where a model differs from them those of the model.

    Attributes:
        read, gemm: of memory that no cache holds, and of float32.
        other_cores: how many of this process's cores other processes used; None: unknown.
        near: the read bandwidth of as many bytes as a step of the model reads; None: `read`.
        integer: the GEMM rate of the model's arithmetic, if it is not float32; None: `gemm`.
    """

    device_name: str
    cores: int
    threads: int
    read: Rate
    gemm: Rate
    other_cores: float | None
    near: Rate | None = None
    integer: Rate | None = None

    @property
    def rates(self) -> Rates:
        return Rates((self.near or self.read).best, (self.integer or self.gemm).best)

    def warnings(self) -> list[str]:
        found = [
            f"the {what} varied by {rate.spread:.0%} between repetitions; shares of it are uncertain"
            for what, rate in (("read bandwidth", self.read), ("GEMM rate", self.gemm))
            if rate.spread > _SPREAD_ALLOWED
        ]
        return found + busy_warning("calibrating", self.other_cores)


def busy_warning(when: str, other_cores: float | None) -> list[str]:
    if other_cores is None or other_cores <= _CORES_ALLOWED:
        return []
    return [f"other processes used {other_cores:.1f} of our cores while {when}; figures are too low"]


def calibrate(seconds: float) -> Calibration:
    """Measure both rates for `seconds` each with PyTorch's current number of threads."""
    platform = select_platform("cpu")[0]
    backend = backend_for(platform)
    with CpuWatch() as watch, torch.inference_mode():
        read = _read_rate(backend, *_PLAIN, min(_READ_BYTES, platform.memory_free() // _READ_SHARE_OF_FREE), seconds)
        gemm = _float_rate(backend, seconds)
    platform.release_memory()
    return Calibration(
        platform.get_device_name(), len(system.cores()), torch.get_num_threads(), read, gemm, watch.other_cores
    )


def calibrate_for(known: Calibration, cost: ModelCost, seconds: float) -> Calibration:
    """`known` with the rates at which a model is read and multiplied."""
    backend = backend_for(select_platform("cpu")[0])
    with torch.inference_mode():
        small = 0 < cost.bytes_per_step < _READ_BYTES
        kinds = [_PLAIN, *sorted(cost.arithmetic)] if small else []
        reads = [_read_rate(backend, *kind, cost.bytes_per_step, seconds) for kind in kinds]
        rates = [_weight_rate(backend, *kind, seconds) for kind in sorted(cost.arithmetic)]
    # Some of the model's layers may not round: no rate is lower than the general one.
    return replace(known, near=_best(known.read, *reads), integer=_best(known.gemm, *rates))


def _best(*rates: Rate) -> Rate | None:
    """The highest of at least two."""
    return max(rates, key=lambda rate: rate.best) if len(rates) > 1 else None


def _read_rate(backend: Backend, kind: str, activations: str, size: int, seconds: float) -> Rate:
    """Bytes per second of a weight of `kind` times one row, the access pattern of decode with one request."""
    weight = _weight(
        backend, kind, activations, max(1, 8 * size // (_INTEGERS.get(kind, 16) * _READ_WIDTH)), _READ_WIDTH
    )
    row, linear = torch.ones(1, _READ_WIDTH), backend.ops.linear
    return _repeat(lambda: linear(row, weight), weight.data.nbytes, seconds)


def _float_rate(backend: Backend, seconds: float) -> Rate:
    """float32 operations per second, of torch.mm or of our GEMM."""
    rows, inner, columns = _GEMM_SHAPE
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    out = torch.empty(rows, columns)
    torchs = _repeat(lambda: torch.mm(left, right, out=out), 2 * rows * inner * columns, seconds / 2)
    ours = _weight_rate(backend, "float32", "float", seconds / 2)
    return max(torchs, ours, key=lambda rate: rate.best)


def _weight_rate(backend: Backend, kind: str, activations: str, seconds: float) -> Rate:
    """Operations per second of our GEMM with a weight of `kind`."""
    rows, inner, columns = _GEMM_SHAPE
    weight, left = _weight(backend, kind, activations, columns, inner), torch.ones(rows, inner)
    linear = backend.ops.linear
    return _repeat(lambda: linear(left, weight), 2 * rows * inner * columns, seconds)


def _weight(backend: Backend, kind: str, activations: str, n: int, k: int) -> Weight:
    pack = backend.ops.pack
    if kind in _INTEGERS:
        weight: Weight = pack(torch.ones(n, k, dtype=torch.int8), kind).scaled(torch.ones(n, 1), group_size=k)
    else:
        weight = pack(torch.ones(n, k, dtype=getattr(torch, kind)))
    return replace(weight, activations=activations)


def _repeat(work: Callable[[], object], amount: int, seconds: float) -> Rate:
    work()  # starts threads and touches pages
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < _LEAST_REPEATS or perf_counter() < end:
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return Rate(amount / min(times), 1 - min(times) / median(times), len(times))


class CpuWatch:
    """Context manager: CPU use of other processes on this process's cores, including time stolen by the hypervisor."""

    def __init__(self) -> None:
        self.other_cores: float | None = None

    def __enter__(self) -> CpuWatch:
        self._started, self._busy, self._own = perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *exc_info: object) -> None:
        elapsed, busy = perf_counter() - self._started, _busy_seconds()
        if busy is None or self._busy is None or elapsed < _SHORTEST_WATCH_SECONDS:
            return
        self.other_cores = max(0.0, busy - self._busy - (_own_seconds() - self._own)) / elapsed


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float | None:
    """Seconds that this process's cores have been busy since boot; None without /proc."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    names = {f"cpu{core}" for core in system.cores()}
    lines = [line.split() for line in path.read_text().splitlines()]
    return sum(_busy_ticks(line[1:]) for line in lines if line[0] in names) / os.sysconf("SC_CLK_TCK")


def _busy_ticks(fields: list[str]) -> int:
    """user, nice, system, idle, iowait, irq, softirq, steal of /proc/stat: all but idle and iowait."""
    ticks = [int(field) for field in fields[:8]]
    return sum(ticks) - sum(ticks[3:5])


# --- What is kept. ---

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
        system.replace(name, folder / _FILE)
    except OSError:
        return  # it is measured again


def stored() -> Calibration | None:
    """What was measured on this machine with as many cores and threads as now; None: nothing."""
    folder = private_cache()
    if folder is None or not is_private(folder / _FILE):
        return None
    name = select_platform("cpu")[0].get_device_name()
    return _calibration(_read(folder / _FILE).get(_key(name, len(system.cores()), torch.get_num_threads())))


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
