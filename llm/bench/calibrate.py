"""The machine's memory read bandwidth and GEMM rate, measured before anything else.

Owns the two rates that every figure is compared with, and the warnings when they are not reliable: a spread between
repetitions, or other processes on the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from llm.engine.cost import Rates
from llm.platforms import select_platform

# Larger than the caches of most machines; on small machines a share of the free memory.
_READ_BYTES = 1 << 30
_READ_SHARE_OF_FREE = 8
_GEMM_SHAPE = (512, 2048, 2048)
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
    """`other_cores`: how many of this process's cores other processes used; None: unknown."""

    device_name: str
    cores: int
    threads: int
    read: Rate
    gemm: Rate
    other_cores: float | None

    @property
    def rates(self) -> Rates:
        return Rates(self.read.best, self.gemm.best)

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
    with CpuWatch() as watch:
        read = _read_rate(min(_READ_BYTES, platform.memory_free() // _READ_SHARE_OF_FREE), seconds)
        gemm = _gemm_rate(_GEMM_SHAPE, seconds)
    platform.release_memory()
    return Calibration(
        platform.get_device_name(), len(usable_cores()), torch.get_num_threads(), read, gemm, watch.other_cores
    )


def _read_rate(size: int, seconds: float) -> Rate:
    """Bytes per second of a float32 matrix times a vector, the access pattern of decode with one request."""
    matrix = torch.ones(max(1, size // (4 * 4096)), 4096)
    vector, out = torch.ones(4096), torch.empty(matrix.shape[0])
    return _repeat(lambda: torch.mv(matrix, vector, out=out), matrix.nbytes, seconds)


def _gemm_rate(shape: tuple[int, int, int], seconds: float) -> Rate:
    """float32 operations per second of torch.mm."""
    rows, inner, columns = shape
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    out = torch.empty(rows, columns)
    return _repeat(lambda: torch.mm(left, right, out=out), 2 * rows * inner * columns, seconds)


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


def usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float | None:
    """Seconds that this process's cores have been busy since boot; None without /proc."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    names = {f"cpu{core}" for core in usable_cores()}
    lines = [line.split() for line in path.read_text().splitlines()]
    return sum(_busy_ticks(line[1:]) for line in lines if line[0] in names) / os.sysconf("SC_CLK_TCK")


def _busy_ticks(fields: list[str]) -> int:
    """user, nice, system, idle, iowait, irq, softirq, steal of /proc/stat: all but idle and iowait."""
    ticks = [int(field) for field in fields[:8]]
    return sum(ticks) - sum(ticks[3:5])
