"""The cost of calling an operation from Python, on one short row where the arithmetic is negligible.

Part of `python -m llm kernels bench`. The same call is also timed as a recorded program, without Python: that is the
kernel and the unpacking of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from llm.forward import AttentionMetadata, KVCacheSpec
from llm.kernels.backend import Backend
from llm.kernels.weight import ExpertWeights

_WIDTH, _OUTPUTS = 32, 16
_HEADS, _KV_HEADS, _HEAD_SIZE = 1, 1, 16
_BLOCK = 16
_EXPERTS, _USED = 32, 8
_CALLS = 500


def run(backend: Backend, repetitions: int = 20) -> Iterator[str]:
    """Lines of a table; the best of the repetitions, in microseconds."""
    yield f"{'one call, microseconds':<22}{'from Python':>12}{'replayed':>10}"
    with torch.inference_mode():
        for name, call in _calls(backend):
            line = f"{name:<22}{_best(call, repetitions):>12.2f}"
            if backend.records:
                recording = backend.record(lambda tokens, call=call: (call(), ())[1])  # type: ignore[misc]
                line += f"{_best(recording.run, repetitions):>10.2f}"
            yield line


def _best(call: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = perf_counter()
        for _ in range(_CALLS):
            call()
        times.append(perf_counter() - started)
    return min(times) / _CALLS * 1e6


def _calls(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, weight, scale = torch.randn(1, _WIDTH), torch.randn(_WIDTH), torch.rand(_OUTPUTS)
    pack = backend.op("pack")
    integers = pack(torch.ones(_OUTPUTS, _WIDTH, dtype=torch.int8), "int8").scaled(scale[:, None])

    def bound(name: str, *arguments: Any, **named: Any) -> tuple[str, Callable[[], Any]]:
        operation = backend.op(name)
        return name, lambda: operation(*arguments, **named)

    yield "linear_float32", bound("linear", x, pack(torch.randn(_OUTPUTS, _WIDTH)))[1]
    yield "linear_w8a8", bound("linear", x, replace(integers, activations="int8"))[1]
    expert = (pack(torch.randn(2 * _OUTPUTS, _WIDTH)), pack(torch.randn(_WIDTH, _OUTPUTS)))
    ids, factors = torch.arange(_USED)[None], torch.rand(1, _USED)
    yield bound("experts", x, ids, factors, ExpertWeights((expert[0],) * _EXPERTS, (expert[1],) * _EXPERTS))
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
