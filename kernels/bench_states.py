"""Decode steps of the operations that keep a state per request, beside the memory's speed.

Part of `python -m llm kernels bench`. A step reads and writes each row's state once, so it can be no faster than a loop
that reads and writes the same memory in place; the two are timed in turns. The states of several layers take turns:
together they are larger than the caches. A layer whose state is in the caches already is timed too: what it takes is
arithmetic and the fixed cost of a call, which are most of a step where the state is small. Sizes are those of published
models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from llm.forward import RecurrentMetadata
from llm.kernels.backend import Backend, Operations

_COLD_BYTES = 192 << 20
_ROWS = (1, 16)
_REPEATED = 8

Step = Callable[[Operations, torch.Tensor, RecurrentMetadata], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operation at the size of a model's layer: the shape of a row's state, and a step of some rows."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[int], Step]


def run(backend: Backend, seconds: float) -> Iterator[str]:
    """Lines of a table: microseconds of a step of one layer, from memory and from the caches, and of the bytes of its
    states at the memory's rate."""
    yield f"states in decode steps, {torch.get_num_threads()} threads; the floor is of states read and written in place"
    yield f"{'':<34}{'rows':>5}{'MB':>8}{'us':>10}{'cached':>10}{'floor us':>10}{'x floor':>9}{'GB/s':>8}"
    for case in CASES:
        for rows in _ROWS:
            nbytes = 4 * rows * torch.Size(case.shape).numel()
            took, cached, floor = (1e6 * time for time in _best(backend, case, rows, seconds))
            times = f"{took:>10.1f}{cached:>10.1f}{floor:>10.1f}{took / floor:>9.2f}{2 * nbytes / floor / 1e3:>8.1f}"
            yield f"{case.name:<34}{rows:>5}{nbytes / 1e6:>8.2f}{times}"


def _best(backend: Backend, case: Case, rows: int, seconds: float) -> tuple[float, float, float]:
    """Seconds of one layer's step, recorded where the backend records; of one whose state was just used; of PyTorch's
    `x *= 1` over the states, with as many threads."""
    nbytes = 4 * rows * torch.Size(case.shape).numel()
    states = torch.randn(1, rows, *case.shape).repeat(max(1, _COLD_BYTES // nbytes), *[1] * (1 + len(case.shape)))
    counts = torch.arange(rows + 1, dtype=torch.int32)
    lengths = torch.full((rows,), 9, dtype=torch.int32)
    metadata = RecurrentMetadata(torch.arange(rows), counts, lengths, [1] * rows, [9] * rows)
    step, last = case.make(rows), states[-1:].expand(_REPEATED, *states.shape[1:])

    def pass_over(layers: torch.Tensor) -> None:
        for state in layers:
            step(backend.ops, state, metadata)

    with torch.inference_mode():
        passes = [_prepared(backend, lambda layers=layers: pass_over(layers)) for layers in (states, last)]  # type: ignore[misc]
        took, cached, floor = _least([*passes, lambda: states.mul_(1.0)], seconds)
    return took / len(states), cached / _REPEATED, floor / len(states)


def _prepared(backend: Backend, function: Callable[[], None]) -> Callable[[], object]:
    if not backend.records:
        return function

    def compute(tokens: int) -> tuple[()]:
        function()
        return ()

    return backend.record(compute).run


def _least(functions: list[Callable[[], object]], seconds: float) -> list[float]:
    """The least time of each; they take turns."""
    least = [math.inf] * len(functions)
    end, turns = perf_counter() + seconds, 0
    while perf_counter() < end or turns < 3:
        for index, function in enumerate(functions):
            started = perf_counter()
            function()
            least[index] = min(least[index], perf_counter() - started)
        turns += 1
    return least


def _convolution(rows: int) -> Step:
    channels, taps = 4096, 4
    x, weight = torch.randn(rows, channels), torch.randn(taps, channels).t()
    return lambda ops, state, metadata: ops.causal_conv1d(x, weight, None, state.transpose(1, 2), metadata, "silu")


def _mamba(rows: int) -> Step:
    channels, states = 8192, 16
    x, dt, gate = (torch.randn(rows, channels) for _ in range(3))
    b, c = (torch.randn(rows, states) for _ in range(2))
    a, d = -torch.rand(states, channels), torch.rand(channels)
    return lambda ops, state, metadata: ops.selective_scan(x, dt, a, b, c, d, None, gate, state, metadata)


def _mamba2(rows: int) -> Step:
    heads, states, size = 48, 128, 64
    x, dt = torch.randn(rows, heads * size), torch.randn(rows, heads)
    b, c = (torch.randn(rows, states) for _ in range(2))
    a, d, bias = -torch.rand(heads), torch.rand(heads), torch.rand(heads)
    return lambda ops, state, metadata: ops.mamba2_scan(x, dt, a, b, c, d, bias, state, metadata)


def _delta_rule(rows: int) -> Step:
    keys, heads, size = 16, 32, 128
    query, key = (torch.randn(rows, keys, size) for _ in range(2))
    value, (decay, beta) = torch.randn(rows, heads, size), torch.randn(2, rows, heads)
    a, bias = -torch.rand(heads), torch.rand(heads)
    return lambda ops, state, metadata: ops.gated_delta_rule(query, key, value, decay, beta, a, bias, state, metadata)


CASES = (
    Case("causal_conv1d, 4096 of 4", (3, 4096), _convolution),
    Case("selective_scan, 8192 x 16", (16, 8192), _mamba),
    Case("mamba2_scan, 48 x 64 x 128", (48, 128, 64), _mamba2),
    Case("gated_delta_rule, 32 x 128 x 128", (32, 128, 128), _delta_rule),
)
