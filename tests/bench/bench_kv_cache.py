"""Decode attention over a long context, quantized against bfloat16: `python tests/bench/bench_kv_cache.py`.

Per shape, caches of all types are filled and read in turn, layer after layer, so that they come from memory. Prints the
median time of a layer, and how many times as fast as bfloat16 it is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from llm.forward import AttentionMetadata, KVCacheSpec, LatentCacheSpec
from llm.kernels.select import backend_for
from llm.platforms import current_platform

# (query heads, KV heads, channels): Qwen2.5 0.5B, Llama 3 8B, heads without groups, Qwen3 30B-A3B.
SHAPES = ((14, 2, 64), (32, 8, 128), (8, 8, 64), (32, 4, 128))
# Latent attention: (query heads, channels of the latent vector, of its rotated part): DeepSeek-V2-Lite, few heads.
LATENT_SHAPES = ((16, 512, 64), (4, 512, 64))
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCK = 16
CACHE_BYTES = 96 << 20  # of a shape's bfloat16 caches together
TURNS = 9


def reader(shape: tuple[int, int, int], dtype: torch.dtype, tokens: int, layers: int) -> Callable[[], float]:
    """A call that computes one token in each layer and returns its seconds."""
    heads, kv_heads, size = shape
    backend = backend_for(current_platform)
    blocks = tokens // BLOCK
    slots, metadata = context(tokens)
    caches = []
    for _ in range(layers):
        shapes = backend.op("kv_cache_shapes")(KVCacheSpec(kv_heads, size, dtype), blocks + 1, BLOCK)
        keys, values = (backend.kv_cache(each, dtype) for each in shapes)
        backend.op("write_kv_cache")(*torch.randn(2, tokens, kv_heads, size), keys, values, slots)
        caches.append((keys, values))
    query, attend = torch.randn(1, heads, size), backend.op("paged_attention")
    return timed(lambda: [attend(query, keys, values, metadata, scale=size**-0.5) for keys, values in caches])


def latent_reader(shape: tuple[int, int, int], dtype: torch.dtype, tokens: int, layers: int) -> Callable[[], float]:
    """The same of latent attention."""
    heads, size, rope_size = shape
    backend = backend_for(current_platform)
    slots, metadata = context(tokens)
    spec = LatentCacheSpec(size + rope_size, dtype, scales=2)
    caches = [torch.zeros(spec.shape(tokens // BLOCK + 1, BLOCK), dtype=dtype) for _ in range(layers)]
    for cache in caches:
        backend.op("write_latent_cache")(torch.randn(tokens, size), torch.randn(tokens, rope_size), cache, slots)
    query, rope, attend = torch.randn(1, heads, size), torch.randn(1, heads, rope_size), backend.op("latent_attention")
    return timed(lambda: [attend(query, rope, cache, metadata, scale=(size + rope_size) ** -0.5) for cache in caches])


def context(tokens: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """The slots of one request in blocks of any order, and its step of one token."""
    table = (torch.randperm(tokens // BLOCK) + 1).int().view(1, -1)
    slots = (table.long().unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten()
    starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([tokens]).int()
    return slots, AttentionMetadata(table, slots[-1:], starts, lengths, BLOCK, [1], [tokens])


def timed(call: Callable[[], object]) -> Callable[[], float]:
    def read() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return read


def measure(reads: dict[str, Callable[[], float]], layers: int) -> str:
    times: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(TURNS + 1):
        for name, read in reads.items():
            times[name].append(read())
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    return "; ".join(
        f"{name} {median * 1e3 / layers:.3f} ms, {medians['bfloat16'] / median:.2f}x"
        for name, median in medians.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of context (%(default)s)")
    tokens = parser.parse_args().tokens // BLOCK * BLOCK
    for shape in SHAPES:
        layers = max(1, CACHE_BYTES // (tokens * shape[1] * shape[2] * 4))
        reads = {name: reader(shape, dtype, tokens, layers) for name, dtype in DTYPES.items()}
        print(f"{shape[0]} heads, {shape[1]} of keys, {shape[2]} channels: {measure(reads, layers)}")
    for shape in LATENT_SHAPES:
        layers = max(1, CACHE_BYTES // (tokens * (shape[1] + shape[2]) * 2))
        reads = {name: latent_reader(shape, dtype, tokens, layers) for name, dtype in DTYPES.items()}
        print(f"{shape[0]} heads over a latent vector of {shape[1]} + {shape[2]}: {measure(reads, layers)}")


if __name__ == "__main__":
    main()
