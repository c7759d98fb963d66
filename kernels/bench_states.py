"""Decode steps of the operations that keep a state per request, beside the memory's speed.

Part of `python -m llm kernels bench`. A step reads and writes each row's state once, so it can be no faster than those
bytes at the rate of a loop that reads and writes memory in place. The states of several layers take turns: together
they are larger than the caches. Sizes are those of published models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.backend import Backend, Operations

_COLD_BYTES = 192 << 20
_ROWS = (1, 16)

Step = Callable[[Operations, torch.Tensor, RecurrentMetadata], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operation at the size of a model's layer: the shape of a row's state, and a step of some rows."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[int], Step]


def run(backend: Backend, seconds: float) -> Iterator[str]:
    """Lines of a table: microseconds of a step of one layer, and of the bytes of its states at the memory's rate."""
    rate = _in_place_rate(seconds)
    threads = torch.get_num_threads()
    yield f"states in decode steps, {threads} threads; memory is read and written at {rate / 1e9:.1f} GB/s"
    yield f"{'':<34}{'rows':>5}{'MB':>8}{'us':>10}{'floor us':>10}{'x floor':>9}"
    for case in CASES:
        for rows in _ROWS:
            nbytes = 4 * rows * torch.Size(case.shape).numel()
            took, floor = _best(backend, case, rows, seconds), 2 * nbytes / rate
            times = f"{took * 1e6:>10.1f}{floor * 1e6:>10.1f}{took / floor:>9.2f}"
            yield f"{case.name:<34}{rows:>5}{nbytes / 1e6:>8.2f}{times}"


def _best(backend: Backend, case: Case, rows: int, seconds: float) -> float:
    """Seconds of one layer's step, recorded where the backend records."""
    nbytes = 4 * rows * torch.Size(case.shape).numel()
    layers = [torch.randn(rows, *case.shape) for _ in range(max(1, _COLD_BYTES // nbytes))]
    counts = torch.arange(rows + 1, dtype=torch.int32)
    lengths = torch.full((rows,), 9, dtype=torch.int32)
    metadata = RecurrentMetadata(torch.arange(rows), counts, lengths, [1] * rows, [9] * rows)
    step = case.make(rows)

    def pass_over() -> object:
        return [step(backend.ops, state, metadata) for state in layers]

    with torch.inference_mode():
        if backend.records:
            with backend.record() as program:
                pass_over()
            return _least(program.run, seconds) / len(layers)
        return _least(pass_over, seconds) / len(layers)


def _least(function: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(times) < 3:
        started = perf_counter()
        function()
        times.append(perf_counter() - started)
    return min(times)


def _in_place_rate(seconds: float) -> float:
    """Bytes per second, read and written, of x = x * y by PyTorch's threads, which are as many."""
    x = torch.ones(_COLD_BYTES // 4)
    return 2 * x.nbytes / _least(lambda: x.mul_(1.0), seconds)


def _convolution(rows: int) -> Step:
    channels, taps = 4096, 4
    x, weight = torch.randn(rows, channels), torch.randn(taps, channels).t()
    return lambda ops, state, metadata: ops.causal_conv1d(x, weight, None, state.transpose(1, 2), metadata, "silu")


def _mamba(rows: int) -> Step:
    channels, states = 8192, 16
    x, dt, gate = (torch.randn(rows, channels) for _ in range(3))
    b, c = (torch.randn(rows, states) for _ in range(2))
    a_log, d = torch.rand(states, channels).t(), torch.rand(channels)
    return lambda ops, state, metadata: ops.selective_scan(x, dt, a_log, b, c, d, None, gate, state, metadata)


def _mamba2(rows: int) -> Step:
    heads, states, size = 48, 128, 64
    x, dt = torch.randn(rows, heads * size), torch.randn(rows, heads)
    b, c = (torch.randn(rows, states) for _ in range(2))
    a_log, d, bias = (torch.rand(heads) for _ in range(3))
    return lambda ops, state, metadata: ops.mamba2_scan(x, dt, a_log, b, c, d, bias, state, metadata)


def _delta_rule(rows: int) -> Step:
    keys, heads, size = 16, 32, 128
    query, key = (torch.randn(rows, keys, size) for _ in range(2))
    value, (decay, beta) = torch.randn(rows, heads, size), torch.randn(2, rows, heads)
    a_log, bias = torch.rand(heads), torch.rand(heads)
    return lambda ops, state, metadata: ops.gated_delta_rule(
        query, key, value, decay, beta, a_log, bias, state, metadata
    )


CASES = (
    Case("causal_conv1d, 4096 of 4", (3, 4096), _convolution),
    Case("selective_scan, 8192 x 16", (16, 8192), _mamba),
    Case("mamba2_scan, 48 x 64 x 128", (48, 128, 64), _mamba2),
    Case("gated_delta_rule, 32 x 128 x 128", (32, 128, 128), _delta_rule),
)
