"""The tensors behind the block tables.

Owns grouping layers by their `KVCacheSpec` and the memory of the caches: zeroed, but touched only when first written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llm.forward import KVCacheSpec


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[list[KVCacheSpec], list[int]]:
    """The distinct specs, one per group, and for each layer the index of its group."""
    groups = list(dict.fromkeys(specs))
    return groups, [groups.index(spec) for spec in specs]


def allocate_kv_caches(
    specs: Sequence[KVCacheSpec], num_blocks: int, block_size: int, kv_cache_shapes: Callable[..., Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(key cache, value cache) per layer, zeros.

    `num_blocks` includes the null block; `kv_cache_shapes(spec, num_blocks, block_size)` is that of the attention
    backend, whose layout the caches have.
    """
    caches = []
    for spec in specs:
        keys, values = kv_cache_shapes(spec, num_blocks, block_size)
        caches.append((_lazy_zeros(keys, spec.dtype), _lazy_zeros(values, spec.dtype)))
    return caches


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros by calloc: `torch.zeros` would write, and so occupy, every page at once."""
    count = int(np.prod(shape)) * dtype.itemsize
    storage = torch.from_numpy(np.zeros(count, dtype=np.uint8)).untyped_storage()
    # Not a view: a view holds its base, and `ModelRunner.close` could not free what somebody else refers to.
    return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)
