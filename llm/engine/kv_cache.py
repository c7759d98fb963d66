"""The tensors behind block tables and slots.

Owns grouping states by their specs; the memory itself is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm.forward import LatentCacheSpec, PagedSpec, RecurrentSpec, StateSpec
from llm.kernels.backend import Backend

# Recurrent states have no group of their own: they are all in the slot of their request.
SLOTS = -1


def group_states(specs: Sequence[StateSpec]) -> tuple[list[PagedSpec], list[int]]:
    """The distinct paged specs, one per group, and for each state the index of its group or `SLOTS`."""
    groups = list(dict.fromkeys(spec for spec in specs if isinstance(spec, PagedSpec)))
    return groups, [groups.index(spec) if isinstance(spec, PagedSpec) else SLOTS for spec in specs]


def allocate_kv_caches(
    specs: Sequence[PagedSpec],
    num_blocks: int,
    block_size: int,
    kv_cache_shapes: Callable[..., Any],
    backend: Backend,
) -> list[tuple[torch.Tensor, ...]]:
    """The zeroed tensors of each state: (key cache, value cache), or (latent cache,).

    `num_blocks` includes the null block; `kv_cache_shapes(spec, num_blocks, block_size)` is that of the attention
    backend, whose layout keys and values have.
    """
    caches: list[tuple[torch.Tensor, ...]] = []
    for spec in specs:
        if isinstance(spec, LatentCacheSpec):
            caches.append((backend.kv_cache(spec.shape(num_blocks, block_size), spec.dtype),))
        else:
            keys, values = kv_cache_shapes(spec, num_blocks, block_size)
            caches.append((backend.kv_cache(keys, spec.dtype), backend.kv_cache(values, spec.dtype)))
    return caches


def allocate_recurrent_states(
    specs: Sequence[RecurrentSpec], num_slots: int, backend: Backend
) -> list[tuple[torch.Tensor, ...]]:
    """The zeroed tensors of each state, [num_slots, ...]; the null slot included."""
    return [
        tuple(
            backend.kv_cache((num_slots, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        for spec in specs
    ]
