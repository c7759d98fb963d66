"""The tensors that block tables and slots index: allocating them, and reading and writing their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm.engine.boundary import CachePart, RunnerPlan
from llm.errors import ValidationError
from llm.forward import SLOTS, KVCacheSpec, LatentCacheSpec, PagedSpec, RecurrentSpec
from llm.kernels.backend import Backend
from llm.layers.attention import attention_backend
from llm.platforms.interface import Platform


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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CacheRows:
    """The blocks and slots of a runner's states as rows, for the prompt cache on disk.

    An attention backend lays out its tensors as it likes, as long as one dimension grows with the number of blocks and
    has them in order: the shapes for several numbers of blocks show which.

    Args:
        states: the tensors of each state of `plan.kv_cache_specs`.
        groups: of each state, as `group_states` gives them.
    """

    def __init__(
        self, platform: Platform, plan: RunnerPlan, states: Sequence[tuple[torch.Tensor, ...]], groups: Sequence[int]
    ) -> None:
        self._platform = platform
        self._cache, self._specs = plan.config.cache_config, plan.kv_cache_specs
        self._states, self._groups = states, groups

    def parts(self) -> list[CachePart]:
        """Every tensor of every state, in the order of the layers.

        Raises:
            ValidationError: a block of some tensor is no row of it.
        """
        parts = []
        for index, state in enumerate(self._states):
            for number in range(len(state)):
                rows = self._rows(index, number)
                parts.append(CachePart(self._groups[index], tuple(rows.shape[1:]), rows.dtype))
        return parts

    def read(self, part: int, rows: Sequence[int]) -> torch.Tensor:
        """A copy of these blocks or slots, [rows, *shape]; `part` counts the tensors as `parts` does."""
        return self._rows(*self._place(part))[self._indices(rows)].cpu().contiguous()

    def write(self, part: int, rows: Sequence[int], values: torch.Tensor) -> None:
        """Set these blocks or slots."""
        target = self._rows(*self._place(part))
        target[self._indices(rows)] = values.to(target.device)

    def _place(self, part: int) -> tuple[int, int]:
        places = [(index, number) for index, state in enumerate(self._states) for number in range(len(state))]
        return places[part]

    def _indices(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._states[0][0].device)

    def _rows(self, index: int, number: int) -> torch.Tensor:
        """A view of a tensor's bits, [blocks or slots, *shape of one]."""
        tensor = self._states[index][number]
        bits = tensor.view(_BITS[tensor.itemsize])
        if self._groups[index] == SLOTS:
            return bits
        dim, width = self._block_in(self._specs[index], number)
        count = self._cache.num_blocks + 1
        return bits.narrow(dim, 0, count * width).unflatten(dim, (count, width)).movedim(dim, 0)

    def _block_in(self, spec: object, number: int) -> tuple[int, int]:
        """(the dimension that has the blocks, how much of it a block is)."""
        shapes = [self._shape(spec, number, blocks) for blocks in (1, 2, 16, 32)]
        grown = [dim for dim, (one, two) in enumerate(zip(shapes[0], shapes[1], strict=True)) if two > one]
        if len(grown) == 1:
            (dim,) = grown
            width = shapes[1][dim] - shapes[0][dim]
            if shapes[3][dim] - shapes[2][dim] == 16 * width:
                return dim, width
        size = self._cache.block_size
        raise ValidationError(
            f"a prompt cache needs blocks that the kernels keep apart, and those of block_size={size} share memory; "
            "pass a block_size that is a multiple of 16.",
            parameter="block_size",
            value=size,
        )

    def _shape(self, spec: object, number: int, blocks: int) -> tuple[int, ...]:
        size = self._cache.block_size
        if isinstance(spec, LatentCacheSpec):
            return spec.shape(blocks, size)
        if not isinstance(spec, KVCacheSpec):
            raise TypeError(f"{type(spec).__name__} is no {PagedSpec.__name__} of this package")
        backend = attention_backend(self._platform, spec.head_size)
        return backend.kv_cache_shapes(self._platform, spec, blocks, size)[number]
