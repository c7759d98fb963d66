"""How long the GEMMs of a decode step take with more threads than this machine has cores, as a model.

    python tests/kernels/thread_model.py --rows 1 32 --threads 1 2 8 32 --bandwidth 43 200

A GEMM is one region of `kernels/cpu/parallel.h`: its tasks (groups of panels of 16 output channels, by blocks of row
tiles, `panels.h`) are taken by the threads one at a time, and the caller waits for the last. So with N threads it takes

    max(ceil(tasks / N) * seconds of a task * slowdown, bytes / bandwidth) + cost of a region

Measured here: a GEMM's seconds on one core, which its tasks share; how much slower a core multiplies while all of this
machine do (a GEMM of 240 rows); the rate at which all of them read; what a region costs, of one worker that spins. For
the bandwidth of another machine `--bandwidth` is taken. That each further worker costs a region an eighth more (it
joins and leaves by two atomic operations on one cache line) is a guess. This machine's threads are predicted and
measured: the last column says how near the model is where it can be tried. Not in it: caches that cores share, nodes of
memory, and what a step has beside GEMMs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llm.kernels.backend import Backend
from llm.kernels.select import backend_for
from llm.kernels.weight import Weight
from llm.platforms import current_platform

# Qwen2.5-0.5B: how many GEMMs of (outputs, inputs) a step has.
HEAD, SQUARE = (151936, 896), (896, 896)
GEMMS = {(1152, 896): 24, SQUARE: 24, (9728, 896): 24, (896, 4864): 24, HEAD: 1}
LANES, TALLEST = 16, {"avx512": 12, "amx": 12}
BLOCK_BYTES, COLD_BYTES, TURNS = 1 << 20, 128 << 20, 5
MORE_PER_WORKER = 1 / 8


@dataclass(frozen=True)
class Region:
    """`one_core`: seconds with one thread; `size`: bytes that are read from memory; `count`: how many a step has."""

    tasks: int
    one_core: float
    size: int
    count: int = 1

    def seconds(self, threads: int, bandwidth: float, cost: float, slowdown: float = 1.0) -> float:
        """Of all `count` of them. `bandwidth`: bytes per second of all cores; `cost`: seconds of a region of two."""
        if threads == 1:
            return self.count * self.one_core
        working = min(threads, self.tasks)
        computed = -(-self.tasks // working) * self.one_core / self.tasks * slowdown
        waits = cost * (1 + MORE_PER_WORKER * (working - 2)) if working > 1 else 0.0
        return self.count * (max(computed, self.size / bandwidth) + waits)


def tasks_of(rows: int, outputs: int, inputs: int, tallest: int) -> int:
    """Of a GEMM with float32 activations and row tiles of at most so many rows (`Tasks` of panels.h)."""
    tiles, panels = -(-rows // tallest), -(-outputs // LANES)
    in_block = max(4, BLOCK_BYTES // (4 * inputs * tallest + 1))
    return -(-panels // (4 if tiles == 1 else 2)) * -(-tiles // in_block)


def tallest_of(backend: Backend) -> int:
    return TALLEST.get(backend.variant.split("_")[0], 6)


# Measuring.


def fastest(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(TURNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


class Step:
    """The GEMMs of a step of `rows` rows, each with copies of its weight that no cache holds together."""

    def __init__(self, backend: Backend, rows: int) -> None:
        self.linear = backend.op("linear")
        self.copies: dict[tuple[int, int], list[Weight]] = {}
        self.inputs = {inputs: torch.randn(rows, inputs) for _, inputs in GEMMS}
        for outputs, inputs in GEMMS:
            weight: Weight = backend.op("pack")(torch.randn(outputs, inputs).bfloat16())
            count = max(1, min(16, COLD_BYTES // weight.nbytes))
            copies = [replace(weight, data=weight.data.clone()) for _ in range(count - 1)]
            self.copies[outputs, inputs] = [weight, *copies]

    def measure(self, threads: int) -> dict[tuple[int, int], float]:
        """Seconds of each GEMM."""
        torch.set_num_threads(threads)
        found = {}
        for shape, copies in self.copies.items():
            x = self.inputs[shape[1]]
            found[shape] = fastest(lambda x=x, copies=copies: [self.linear(x, one) for one in copies]) / len(copies)  # type: ignore[misc]
        return found

    def bandwidth(self, threads: int) -> float:
        """Bytes per second at which one row reads the head."""
        head, x = self.copies[HEAD][0], torch.ones(1, HEAD[1])
        torch.set_num_threads(threads)
        return head.nbytes / fastest(lambda: self.linear(x, head))

    def slowdown(self, threads: int) -> float:
        """Of a core that multiplies, while so many do."""
        weight, x, seconds = self.copies[SQUARE][0], torch.ones(240, SQUARE[1]), []
        for count in (1, threads):
            torch.set_num_threads(count)
            seconds.append(count * fastest(lambda: self.linear(x, weight)))
        return max(1.0, seconds[1] / seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[], help="GB/s of other machines")
    args = parser.parse_args()
    backend = backend_for(current_platform)
    tallest, cores = tallest_of(backend), current_platform.num_threads()
    print("| rows | GB/s |", " | ".join(f"{threads} threads, ms" for threads in args.threads), "| here, of the model |")
    print("|---" * (3 + len(args.threads)) + "|")
    for rows in args.rows:
        step = Step(backend, rows)
        alone, all_cores, here = step.measure(1), step.measure(cores), step.bandwidth(cores)
        slowdown = step.slowdown(cores)
        cost = backend.library.function("llm_region_ns")() / 1e9  # type: ignore[attr-defined]
        regions = [
            Region(tasks_of(rows, *shape, tallest), alone[shape], step.copies[shape][0].nbytes, count)
            for shape, count in GEMMS.items()
        ]
        measured = sum(all_cores[shape] * count for shape, count in GEMMS.items())
        for rate in (here, *(given * 1e9 for given in args.bandwidth)):
            times = [sum(one.seconds(threads, rate, cost, slowdown) for one in regions) for threads in args.threads]
            model = sum(one.seconds(cores, rate, cost, slowdown) for one in regions)
            ratio = f"{measured / model:.2f} with {cores} threads, slowdown {slowdown:.2f}" if rate == here else ""
            print(f"| {rows} | {rate / 1e9:.0f} |", " | ".join(f"{1e3 * each:.1f}" for each in times), f"| {ratio} |")


if __name__ == "__main__":
    main()
