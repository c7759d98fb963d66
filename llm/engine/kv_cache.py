"""The tensors behind the block tables.

Owns grouping layers by their `KVCacheSpec`; the memory itself is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm.forward import KVCacheSpec
from llm.kernels.backend import Backend


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[list[KVCacheSpec], list[int]]:
    """The distinct specs, one per group, and for each layer the index of its group."""
    groups = list(dict.fromkeys(specs))
    return groups, [groups.index(spec) for spec in specs]


def allocate_kv_caches(
    specs: Sequence[KVCacheSpec],
    num_blocks: int,
    block_size: int,
    kv_cache_shapes: Callable[..., Any],
    backend: Backend,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(key cache, value cache) per layer, zeros.

    `num_blocks` includes the null block; `kv_cache_shapes(spec, num_blocks, block_size)` is that of the attention
    backend, whose layout the caches have.
    """
    caches = []
    for spec in specs:
        keys, values = kv_cache_shapes(spec, num_blocks, block_size)
        caches.append((backend.kv_cache(keys, spec.dtype), backend.kv_cache(values, spec.dtype)))
    return caches
