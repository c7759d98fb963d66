"""`python -m llm kernels bench`: GEMM rates next to PyTorch's and to memory bandwidth, rates of the experts of a
mixture, decode steps with recurrent states, and the time of one call.

Ours and PyTorch's alternate in the same process; the best and the median of the repetitions are shown. With few rows,
as in a decode step, the weights exceed the caches, and our GEMMs are recorded and replayed without Python
(program.py). PyTorch's libraries choose their own instruction set: to compare with LLM_CPU_ISA=avx2, also set
MKL_ENABLE_INSTRUCTIONS=AVX2 and FBGEMM_ENABLE_INSTRUCTIONS=AVX2.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from llm.forward import AttentionMetadata, KVCacheSpec, RecurrentMetadata
from llm.kernels.backend import Backend, Operations
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
# Of all states that take turns, and how often a state in the caches is used.
_COLD_STATES, _REPEATED = 192 << 20, 8
_STATE_ROWS = (1, 16)
# Of one call: so small that the arithmetic is negligible.
_WIDTH, _OUTPUTS = 32, 16
_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK = 1, 1, 16, 16
_SHORT_EXPERTS, _SHORT_USED = 32, 8
_CALLS = 500
_REPETITIONS = 20  # of so many calls


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
    yield from state_lines(backend, seconds)
    yield from call_lines(backend)


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


Step = Callable[[Operations, torch.Tensor, RecurrentMetadata], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operation at the size of a model's layer: the shape of a row's state, and a step of some rows."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[int], Step]


def state_lines(backend: Backend, seconds: float) -> Iterator[str]:
    """Decode steps of the operations that keep a state per request, in microseconds, beside the memory's speed.

    A step reads and writes each row's state once, so it can be no faster than a loop that reads and writes the same
    memory in place; the two are timed in turns. The states of several layers take turns: together they are larger than
    the caches. A layer whose state is in the caches already is timed too: what it takes is arithmetic and the fixed
    cost of a call. Sizes are those of published models.
    """
    yield f"states in decode steps, {torch.get_num_threads()} threads; the floor is of states read and written in place"
    yield f"{'':<34}{'rows':>5}{'MB':>8}{'us':>10}{'cached':>10}{'floor us':>10}{'x floor':>9}{'GB/s':>8}"
    for case in CASES:
        for rows in _STATE_ROWS:
            nbytes = 4 * rows * torch.Size(case.shape).numel()
            took, cached, floor = (1e6 * time for time in _step_times(backend, case, rows, seconds))
            times = f"{took:>10.1f}{cached:>10.1f}{floor:>10.1f}{took / floor:>9.2f}{2 * nbytes / floor / 1e3:>8.1f}"
            yield f"{case.name:<34}{rows:>5}{nbytes / 1e6:>8.2f}{times}"


def _step_times(backend: Backend, case: Case, rows: int, seconds: float) -> tuple[float, float, float]:
    """Seconds of one layer's step, recorded where the backend records; of one whose state was just used; of PyTorch's
    `x *= 1` over the states, with as many threads."""
    nbytes = 4 * rows * torch.Size(case.shape).numel()
    states = torch.randn(1, rows, *case.shape).repeat(max(1, _COLD_STATES // nbytes), *[1] * (1 + len(case.shape)))
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


def call_lines(backend: Backend) -> Iterator[str]:
    """What it takes to call an operation from Python, on one short row where the arithmetic is negligible, and as a
    recorded program: the kernel and the unpacking of its arguments. The best of the repetitions, in microseconds."""
    yield f"{'one call, microseconds':<22}{'from Python':>12}{'replayed':>10}"
    with torch.inference_mode():
        for name, call in _short_calls(backend):
            line = f"{name:<22}{_call_time(call):>12.2f}"
            if backend.records:
                recording = backend.record(lambda tokens, call=call: (call(), ())[1])  # type: ignore[misc]
                line += f"{_call_time(recording.run):>10.2f}"
            yield line


def _call_time(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPETITIONS):
        started = perf_counter()
        for _ in range(_CALLS):
            call()
        times.append(perf_counter() - started)
    return min(times) / _CALLS * 1e6


def _short_calls(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, weight, scale = torch.randn(1, _WIDTH), torch.randn(_WIDTH), torch.rand(_OUTPUTS)
    pack = backend.op("pack")
    integers = pack(torch.ones(_OUTPUTS, _WIDTH, dtype=torch.int8), "int8").scaled(scale[:, None])

    def bound(name: str, *arguments: Any, **named: Any) -> tuple[str, Callable[[], Any]]:
        operation = backend.op(name)
        return name, lambda: operation(*arguments, **named)

    yield "linear_float32", bound("linear", x, pack(torch.randn(_OUTPUTS, _WIDTH)))[1]
    yield "linear_w8a8", bound("linear", x, replace(integers, activations="int8"))[1]
    expert = (pack(torch.randn(2 * _OUTPUTS, _WIDTH)), pack(torch.randn(_WIDTH, _OUTPUTS)))
    ids, factors = torch.arange(_SHORT_USED)[None], torch.rand(1, _SHORT_USED)
    yield bound("experts", x, ids, factors, ExpertWeights((expert[0],) * _SHORT_EXPERTS, (expert[1],) * _SHORT_EXPERTS))
    yield bound("rms_norm", x, weight, 1e-6)
    yield bound("add_rms_norm", x, x, weight, 1e-6)
    yield bound("silu_and_mul", x)
    kv, size = _KV_HEADS * _HEAD_SIZE, _HEAD_SIZE
    query, key, value = torch.randn(1, _HEADS * size + 2 * kv).split([_HEADS * size, kv, kv], dim=-1)
    positions, slots, table = torch.tensor([1]), torch.tensor([_BLOCK + 1]), torch.randn(4, size)
    shapes = backend.op("kv_cache_shapes")(KVCacheSpec(_KV_HEADS, size, torch.float32), 2, _BLOCK)
    caches = tuple(torch.zeros(shape) for shape in shapes)
    by_head = [item.view(1, -1, size) for item in (query, key, value)]
    yield bound("rotary_embedding", positions, query, key, table, size)
    yield bound("write_kv_cache", *by_head[1:], *caches, slots)
    numbers = (torch.tensor(item, dtype=torch.int32) for item in ([[1]], [0, 1], [2]))
    block_table, starts, lengths = numbers
    step = AttentionMetadata(block_table, slots, starts, lengths, _BLOCK, [1], [2])
    yield bound("paged_attention", by_head[0], *caches, step, scale=0.25)
