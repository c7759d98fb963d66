"""The tensors that block tables and slots index.

Owns grouping states by their specs. The backend allocates the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm.forward import LatentCacheSpec, PagedSpec, RecurrentSpec, StateSpec
from llm.kernels.backend import Backend

# Recurrent states have no KV group: all states of a request are in its slot.
SLOTS = -1


def group_states(specs: Sequence[StateSpec]) -> tuple[list[PagedSpec], list[int]]:
    """(the distinct paged specs, one per group; for each state, the index of its group or `SLOTS`)."""
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

    `num_blocks` includes the null block; `kv_cache_shapes(spec, num_blocks, block_size)` is the attention backend's.
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
    """The zeroed tensors of each state, [num_slots, ...]; `num_slots` includes the null slot."""
    return [
        tuple(
            backend.kv_cache((num_slots, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        for spec in specs
    ]
