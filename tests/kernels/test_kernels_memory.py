"""The memory of large results: used again once nobody reads it, never before, and given back when a model closes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded import open_llm
from kernel_sets import has_kernels, needs_compiler

from llm.kernels.cpu.memory import Pool, eighths
from llm.kernels.select import backend_for
from llm.platforms import current_platform

LARGE = 1 << 21


def test_a_block_is_used_again_once_its_last_tensor_is_gone() -> None:
    pool = Pool(1 << 20)
    first = pool.empty((3, 5), torch.float32)
    address, part = first.data_ptr(), first[1:]
    del first
    assert pool.empty((3, 5), torch.float32).data_ptr() != address  # `part` still reads it
    del part
    assert pool.empty((15,), torch.float32).data_ptr() == address


def test_tensors_that_live_together_share_nothing() -> None:
    pool = Pool(1 << 20)
    tensors = [pool.empty((count,), torch.float32).fill_(count) for count in (1, 7, 7, 16, 17, 7)]
    for tensor in tensors:
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, torch.full_like(tensor, tensor.numel()))


def test_what_waits_longest_goes_first() -> None:
    pool = Pool(200)
    kept = [pool.empty((16,), torch.float32) for _ in range(5)]
    last = kept[-1].data_ptr()
    while kept:
        kept.pop(0)
    assert pool.free_bytes == 192
    assert pool.empty((16,), torch.float32).data_ptr() == last
    pool.clear()
    assert not pool.free_bytes


def test_large_blocks_begin_on_large_pages_and_are_prepared_once() -> None:
    asked: list[tuple[int, int]] = []
    pool = Pool(1 << 30, eighths, lambda address, nbytes: asked.append((address, nbytes)))
    for rows in (600, 610, 600):  # all of one size
        tensor = pool.empty((rows, 1024), torch.float32)
        assert tensor.data_ptr() % LARGE == 0
        del tensor
    assert len(asked) == 1
    assert asked[0][0] % LARGE == 0


@pytest.mark.parametrize("nbytes", [1, 7, 8, 15, 16, 17, 1000, 4096, 4097, (1 << 24) + 1])
def test_sizes_grow_by_an_eighth_at_most(nbytes: int) -> None:
    assert nbytes <= eighths(nbytes) <= nbytes * 9 / 8 + 1
    assert eighths(eighths(nbytes)) == eighths(nbytes)


@needs_compiler
@pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")
def test_a_model_that_closes_gives_its_memory_back() -> None:
    backend: Any = backend_for(current_platform)
    with open_llm():
        held = backend.empty(1 << 20)
        del held
        assert backend.library.pool.free_bytes >= 4 << 20
    assert not backend.library.pool.free_bytes
