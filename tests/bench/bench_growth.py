"""A decode step of a batch that grows, in rows and in context: `python tests/bench/bench_growth.py --page`.

GEMMs and attention of one layer of Qwen2.5-0.5B and its head, from memory: weights and caches are larger than the
processor's. A step of the model is 24 such layers and the head. Its floor is the larger of the time in which its bytes
are read and that in which its operations are made, at the best rates of this machine, for GEMMs and for attention each:
what a step has beside them (norms, sampling, Python between two steps) is not in the table. `--page` writes the table
of docs/reference/speed.md. Timings need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llm.forward import AttentionMetadata, KVCacheSpec
from llm.kernels.backend import Backend
from llm.kernels.select import backend_for
from llm.kernels.weight import Weight
from llm.platforms import current_platform
from llm.tools.bench.machine import calibrate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "speed.md"
MARKS = ("<!-- growth -->", "<!-- end of growth -->")
# Qwen2.5-0.5B: (outputs, inputs) of a layer's GEMMs, and of the head; heads, heads of keys, channels.
LAYERS, GEMMS, HEAD = 24, ((1152, 896), (896, 896), (9728, 896), (896, 4864)), (151936, 896)
HEADS, KV_HEADS, CHANNELS = 14, 2, 64
BLOCK, TURNS, COLD_BYTES = 16, 5, 192 << 20
ARITHMETIC = {"auto": "float", "bfloat16": "bfloat16"}
CACHES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Rates:
    """Bytes per second of memory; activations -> operations per second."""

    read: float
    gemm: dict[str, float]


@dataclass(frozen=True)
class Part:
    """Seconds of a step, as measured, and the least that the machine's rates allow."""

    seconds: float
    floor: float

    def __add__(self, other: Part) -> Part:
        return Part(self.seconds + other.seconds, self.floor + other.floor)

    def times(self, count: int) -> Part:
        return Part(self.seconds * count, self.floor * count)


def fastest(call: Callable[[], object], turns: int = TURNS) -> float:
    call()
    taken = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def gemm_rate(backend: Backend, activations: str) -> float:
    """Operations per second of a prompt's GEMM."""
    weight = replace(backend.op("pack")(torch.randn(GEMMS[2]).bfloat16()), activations=activations)
    x, linear = torch.randn(480, GEMMS[2][1]), backend.op("linear")
    return 2 * x.numel() * weight.n / fastest(lambda: linear(x, weight), 20)


def packed(backend: Backend, shape: tuple[int, int]) -> list[Weight]:
    """Copies that no cache holds together."""
    weight: Weight = backend.op("pack")(torch.randn(shape).bfloat16())
    copies = max(1, min(40, COLD_BYTES // weight.nbytes))
    return [weight, *(replace(weight, data=weight.data.clone()) for _ in range(copies - 1))]


def gemms(backend: Backend, weights: Sequence[Sequence[Weight]], activations: str, rows: int, rates: Rates) -> Part:
    """Of one layer, or of the head: `weights` has the copies of each."""
    linear, found = backend.op("linear"), Part(0.0, 0.0)
    for copies in weights:
        used, one = [replace(each, activations=activations) for each in copies], copies[0]
        x = torch.randn(rows, one.k)
        seconds = fastest(lambda x=x, used=used: [linear(x, each) for each in used]) / len(used)  # type: ignore[misc]
        floor = max(one.nbytes / rates.read, 2 * rows * one.n * one.k / rates.gemm[activations])
        found += Part(seconds, floor)
    return found


def attention(backend: Backend, dtype: torch.dtype, rows: int, context: int, rates: Rates) -> Part:
    """Of one layer: a token of each row over a cache of its own."""
    blocks = context // BLOCK
    spec = KVCacheSpec(KV_HEADS, CHANNELS, dtype)
    shapes = backend.op("kv_cache_shapes")(spec, rows * blocks + 1, BLOCK)
    keys, values = (backend.kv_cache(each, dtype) for each in shapes)
    table = (torch.arange(rows * blocks) + 1).int().view(rows, blocks)
    new = torch.randn(2, context, KV_HEADS, CHANNELS)
    for row in table.long():
        slots = (row.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten()
        backend.op("write_kv_cache")(*new, keys, values, slots)
    last = table[:, -1].long() * BLOCK + BLOCK - 1
    lengths = torch.full((rows,), context).int()
    metadata = AttentionMetadata(
        table, last, torch.arange(rows + 1).int(), lengths, BLOCK, [1] * rows, [context] * rows
    )
    query, attend = torch.randn(rows, HEADS, CHANNELS), backend.op("paged_attention")
    seconds = fastest(lambda: attend(query, keys, values, metadata, scale=CHANNELS**-0.5), 3)
    operations = 4 * HEADS * CHANNELS * context * rows
    return Part(seconds, max((keys.nbytes + values.nbytes) / rates.read, operations / rates.gemm["float"]))


def table(rows: Sequence[int], contexts: Sequence[int]) -> list[str]:
    backend = backend_for(current_platform)
    with torch.inference_mode():
        gemm = {activations: gemm_rate(backend, activations) for activations in ARITHMETIC.values()}
        rates = Rates(calibrate(1.0).read.best, gemm)
        lines = [
            f"Two rates bound it: {rates.read / 1e9:.0f} GB/s, and {gemm['float'] / 1e9:.0f} GFLOP/s "
            f'({gemm["bfloat16"] / 1e9:.0f} with `dtype="bfloat16"`).',
            "",
            "| rows, context | "
            + " | ".join(f"{name}, {cache} cache" for name in ARITHMETIC for cache in CACHES)
            + " |",
            "|---|" + "---|" * (len(ARITHMETIC) * len(CACHES)),
        ]
        layer, head = [packed(backend, shape) for shape in GEMMS], [packed(backend, HEAD)]
        for count in rows:
            products = {
                name: gemms(backend, layer, activations, count, rates).times(LAYERS)
                + gemms(backend, head, activations, count, rates)
                for name, activations in ARITHMETIC.items()
            }
            for context in contexts:
                read = {
                    cache: attention(backend, dtype, count, context, rates).times(LAYERS)
                    for cache, dtype in CACHES.items()
                }
                cells = []
                for name in ARITHMETIC:
                    for cache in CACHES:
                        step = products[name] + read[cache]
                        cells.append(f"{count / step.seconds:.0f}, {step.floor / step.seconds:.2f}")
                lines.append(f"| {count}, {context:,} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    return lines


def write_page(lines: Sequence[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n" + "\n".join(lines) + f"\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096, 16384])
    parser.add_argument("--page", action="store_true", help="write the page's table")
    args = parser.parse_args()
    lines = table(args.rows, args.contexts)
    if args.page:
        write_page(lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
