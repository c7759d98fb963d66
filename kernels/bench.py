"""`python -m llm kernels bench`: GEMM rates next to PyTorch's and to memory bandwidth, rates of the experts of a
mixture, decode steps with recurrent states (bench_states.py), and the time of one call (bench_calls.py).

Ours and PyTorch's alternate in the same process; the best and the median of the repetitions are shown. With few rows,
as in a decode step, the weights exceed the caches, and our GEMMs are recorded and replayed without Python
(program.py). PyTorch's libraries choose their own instruction set: to compare with LLM_CPU_ISA=avx2, also set
MKL_ENABLE_INSTRUCTIONS=AVX2 and FBGEMM_ENABLE_INSTRUCTIONS=AVX2.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from llm.kernels import bench_calls, bench_states
from llm.kernels.backend import Backend
from llm.kernels.weight import FLOAT_KINDS, ExpertWeights, Weight

# (outputs, inputs): the feed-forward of a 0.5 B model, both ways, and a square.
SHAPES = ((4864, 896), (896, 4864), (2048, 2048))
ROWS = (1, 4, 16, 64, 240)
# A mixture of experts: outputs and inputs of each, how many there are, and how many a token uses.
EXPERT, EXPERTS, USED = (768, 2048), 32, 8
EXPERT_ROWS = (1, 16, 240)
MIXTURES = (
    ("experts bf16", "bfloat16", "float"),
    ("experts w8a8", "int8", "int8"),
    ("experts w4a8", "int4", "int8"),
    ("experts w4a16", "int4", "float"),
)
# With few rows, the copies of a weight are this large together, so that none is in a cache when it is read again.
_COLD_BYTES = 256 << 20
_FEW_ROWS = 8
_READ_BYTES = 1 << 28


@dataclass(frozen=True)
class Line:
    """One measurement. best, median: operations per second; bytes_per_s: of weights and scales, at best."""

    name: str
    rows: int
    shape: tuple[int, int]
    best: float
    median: float
    bytes_per_s: float

    def __str__(self) -> str:
        shape = f"{self.shape[0]}x{self.shape[1]}"
        rates = f"{self.best / 1e9:8.0f} {self.median / 1e9:8.0f} {self.bytes_per_s / 1e9:8.1f}"
        return f"{self.name:<14}{self.rows:>5}  {shape:<11}{rates}"


HEADING = f"{'':<14}{'rows':>5}  {'weight':<11}{'G/s':>8} {'median':>8} {'GB/s':>8}"


def run(backend: Backend, seconds: float) -> Iterator[str]:
    """Lines of the table, as they are measured; `seconds` for each entry."""
    yield f"{backend.source('linear')}, {torch.get_num_threads()} threads; weights of N x K, float32 activations"
    yield f"reads {_read_rate() / 1e9:.1f} GB/s (torch.mv)"
    yield HEADING
    for shape in SHAPES:
        for rows in ROWS:
            products = dict(_products(backend, shape, rows))
            yield from map(str, _measure(backend, products, shape, rows, seconds))
    yield f"{USED} of {EXPERTS} experts of {EXPERT[0]}x{EXPERT[1]}, bytes of those that are used"
    for rows in EXPERT_ROWS:
        shape = (3 * USED * EXPERT[0], EXPERT[1])
        yield from map(str, _measure(backend, dict(_mixtures(backend, rows)), shape, rows, seconds))
    yield from bench_states.run(backend, seconds)
    yield from bench_calls.run(backend)


Calls = list[Callable[[torch.Tensor], Any]]
Product = tuple[int, Calls]


def _products(backend: Backend, shape: tuple[int, int], rows: int) -> Iterator[tuple[str, Product]]:
    """(name, (bytes of one weight and its scales, the GEMM with each copy of the weight))."""
    n, k = shape
    pack, linear = backend.op("pack"), backend.op("linear")

    def copies(nbytes: int, make: Callable[[], Any], call: Callable[[Any, torch.Tensor], Any]) -> Product:
        count = max(1, _COLD_BYTES // nbytes) if rows <= _FEW_ROWS else 1
        return nbytes, [functools.partial(call, make()) for _ in range(count)]

    def ours(make: Callable[[], Weight]) -> Product:
        weight = make()
        return copies(_bytes_read(weight), make, lambda held, x: linear(x, held))

    def scaled(kind: str, activations: str, group: int, table: torch.Tensor | None = None) -> Product:
        values = torch.randint(-8, 8, (n, k), dtype=torch.int8)
        if kind == "float8":  # as in a checkpoint, whose largest value is 448 times the scale
            values = (100 * torch.randn(n, k)).clamp(-448, 448).to(torch.float8_e4m3fn)

        def make() -> Weight:
            """Each copy has its own scales: they too must come from memory."""
            packed: Weight = pack(values, kind).scaled(torch.rand(n, -(-k // group)), group_size=group)
            return replace(packed, activations=activations, table=table)

        return ours(make)

    for dtype, name in FLOAT_KINDS.items():
        floats = torch.randn(n, k).to(dtype)
        yield name, ours(lambda floats=floats: pack(floats))  # type: ignore[misc]
    yield "w8a8", scaled("int8", "int8", k)
    for group in (k, 128, 32):
        yield "w4a8" if group == k else f"w4a8 g={group}", scaled("int4", "int8", group)
    yield "w8a16", scaled("int8", "float", k)
    for group in (128, 32):
        yield f"w4a16 g={group}", scaled("int4", "float", group)
    for group in (k, 128):
        yield "fp8" if group == k else f"fp8 g={group}", scaled("float8", "float", group)
    yield "fp4 g=32", scaled("int4", "float", 32, torch.arange(16.0))
    yield "table g=64", scaled("int4", "float", 64, torch.linspace(-1, 1, 16))
    weight = torch.randn(n, k)
    yield "torch float32", copies(weight.nbytes, weight.clone, lambda w, x: F.linear(x, w))
    if rows > _FEW_ROWS:
        quantized = _torch_int8(n, k)
        yield "torch int8", copies(n * k, lambda: quantized, lambda layer, x: layer(x))


def _mixtures(backend: Backend, rows: int) -> Iterator[tuple[str, Product]]:
    """Name -> (bytes of the experts that one call uses, calls that use other experts in turn)."""
    pack, experts = backend.op("pack"), backend.op("experts")
    floats = torch.randn(2 * EXPERT[0], EXPERT[1]).bfloat16()
    values = torch.randint(-8, 8, floats.shape, dtype=torch.int8)

    def packed(kind: str, activations: str, n: int, k: int) -> Weight:
        if kind == "bfloat16":
            return pack(floats.flatten()[: n * k].view(n, k))
        group = 128 if kind == "int4" else k
        weight: Weight = pack(values.flatten()[: n * k].view(n, k), kind)
        return replace(weight.scaled(torch.rand(n, -(-k // group)), group_size=group), activations=activations)

    if rows == 1:
        chosen = torch.arange(EXPERTS).view(-1, 1, USED)
    else:
        chosen = torch.rand(1, rows, EXPERTS).argsort(dim=-1)[..., :USED].contiguous()
    factors = torch.rand(rows, USED)
    inner, hidden = EXPERT
    for name, kind, activations in MIXTURES:
        gate_up, down = (
            tuple(packed(kind, activations, *shape) for _ in range(EXPERTS))
            for shape in ((2 * inner, hidden), (hidden, inner))
        )
        weights = ExpertWeights(gate_up, down)
        nbytes = (_bytes_read(gate_up[0]) + _bytes_read(down[0])) * len(chosen[0].unique())
        call = functools.partial(experts, topk_weights=factors, weights=weights)
        yield name, (nbytes, [functools.partial(call, topk_ids=ids) for ids in chosen])


def _bytes_read(weight: Weight) -> int:
    """Of the weight and its scales."""
    return weight.data.nbytes + (0 if weight.scale is None else weight.scale.nbytes)


def _torch_int8(n: int, k: int) -> Any:
    """PyTorch's dynamically quantized linear layer (FBGEMM on x86)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = torch.nn.Sequential(torch.nn.Linear(k, n))
        return torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)


def _measure(
    backend: Backend, products: dict[str, Product], shape: tuple[int, int], rows: int, seconds: float
) -> Iterator[Line]:
    x = torch.randn(rows, shape[1])
    times: dict[str, list[float]] = {name: [] for name in products}
    with torch.inference_mode():
        passes = {name: _all_of(backend, name, calls, x) for name, (_, calls) in products.items()}
        end = perf_counter() + seconds * len(products)
        while perf_counter() < end or len(next(iter(times.values()))) < 3:
            for name, run_all in passes.items():
                times[name].append(_time(run_all))
    for name, (nbytes, calls) in products.items():
        operations = 2 * rows * shape[0] * shape[1] * len(calls)
        best, middle = min(times[name]), median(times[name])
        yield Line(name, rows, shape, operations / best, operations / middle, nbytes * len(calls) / best)


def _all_of(backend: Backend, name: str, calls: Calls, x: torch.Tensor) -> Callable[[], Any]:
    """A function that runs each of `calls` once; few rows are replayed if the backend records."""
    if len(x) > _FEW_ROWS or not backend.records or name.startswith("torch"):
        return lambda: [call(x) for call in calls]
    return backend.record(lambda tokens: [call(x) for call in calls]).run


def _time(function: Callable[[], Any]) -> float:
    started = perf_counter()
    function()
    return perf_counter() - started


def _read_rate() -> float:
    """Bytes per second of a float32 matrix-vector product, at best."""
    matrix, vector = torch.ones(_READ_BYTES // (4 * 4096), 4096), torch.ones(4096)
    return matrix.nbytes / min(_time(lambda: torch.mv(matrix, vector)) for _ in range(10))
