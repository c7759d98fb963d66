"""Weights that several processes have once: only the same bytes are shared, whoever comes first or dies."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_sets import needs_kernels
from ranks.matrix import answers
from safetensors.torch import load_file
from tiny_models import TINY_MODELS, make_prompts, one_thread, write_checkpoint

from llm.base import system
from llm.config.engine import LLMArgs
from llm.loading.shared_weights import SharedWeights, shared_weights_file
from llm.setup.build import BuiltEngine, build_engine

pytestmark = pytest.mark.skipif(not system.has_unnamed_files(), reason="files in memory without a name are Linux's")
MIB = 1 << 20


@pytest.fixture
def file() -> Iterator[int]:
    made = shared_weights_file(MIB)
    yield made
    os.close(made)


def weight(seed: int, rows: int = 90, columns: int = 70) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_the_same_bytes_are_shared_and_others_are_not(file: int) -> None:
    first, second, third = (SharedWeights(file) for _ in range(3))
    kept = first.keep("a", weight(1))
    assert kept.data_ptr() != weight(1).data_ptr() and torch.equal(kept, weight(1)) and first.shared == kept.nbytes
    again = second.keep("a", weight(1))
    assert torch.equal(again, weight(1)) and (second.shared, second.own) == (kept.nbytes, 0)
    for other in (weight(2), weight(1, rows=91), weight(1)[:, ::2]):
        assert third.keep("a", other) is other
        third._kept.clear()
    assert third.shared == 0 and third.own == sum(item.nbytes for item in (weight(2), weight(1, 91), weight(1)[:, ::2]))
    # Of one layer the first, the second and so on; transposed ones as they lie.
    assert torch.equal(first.keep("a", weight(3).t()), weight(3).t()) and first.shared == 2 * kept.nbytes
    assert torch.equal(second.keep("a", weight(3).t()), weight(3).t()) and second.shared == 2 * kept.nbytes
    for each in (first, second, third):
        each.close()
    assert torch.equal(again, weight(1)), "a tensor outlives its file"


def in_huge_pages() -> int:
    """Bytes of files in memory that this process has in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped"))


def test_pages_are_joined_once_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[bool] = []
    own = system.join_pages
    monkeypatch.setattr(system, "join_pages", lambda *given: joined.append(own(*given)))
    file, before = shared_weights_file(8 * MIB), in_huge_pages()
    one, two = SharedWeights(file), SharedWeights(file)
    big = [weight(seed, 1024, 1024) for seed in (1, 2)]
    kept = [place.keep(str(index), each) for place in (one, two) for index, each in enumerate(big)]
    assert in_huge_pages() == before
    one.close()
    two.close()
    os.close(file)
    assert all(torch.equal(each, big[index % 2]) for index, each in enumerate(kept))
    assert all(each.untyped_storage().data_ptr() % system.HUGE_PAGE == 0 for each in kept)
    if all(joined):  # of a system that does, and has such pages
        assert in_huge_pages() >= before + 2 * 8 * MIB
    kept[0].zero_()
    assert torch.equal(kept[2], big[0])


def test_who_writes_to_a_weight_changes_no_other(file: int) -> None:
    one, two = SharedWeights(file).keep("a", weight(1)), SharedWeights(file).keep("a", weight(1))
    one.zero_()
    assert torch.equal(two, weight(1)) and not one.any()
    assert torch.equal(SharedWeights(file).keep("a", weight(1)), weight(1))


def test_small_ones_and_those_without_room_stay_where_they_are(file: int) -> None:
    place = SharedWeights(file)
    small, large = weight(1, 8, 8), torch.zeros(os.fstat(file).st_size, dtype=torch.uint8)
    assert place.keep("a", small) is small and place.keep("b", large) is large and place.shared == 0
    assert torch.equal(place.keep("c", weight(2)), weight(2)) and place.shared == weight(2).nbytes


def test_what_a_dead_process_has_half_written_is_written_again(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, living = SharedWeights(file), SharedWeights(file)
    dying.keep("a", weight(1))
    own = system.write_all

    def half(descriptor: int, data: Any, offset: int) -> None:
        own(descriptor, memoryview(data).cast("B")[:100], offset)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(system, "write_all", half)
        with pytest.raises(KeyboardInterrupt):
            dying.keep("b", weight(2))
    assert torch.equal(living.keep("b", weight(3)), weight(3)) and living.shared == weight(3).nbytes
    assert torch.equal(living.keep("a", weight(1)), weight(1)) and living.shared == 2 * weight(1).nbytes


def test_many_at_once(file: int) -> None:
    """Each thread is a process: locks are of the opened file, which each opens."""
    found: list[SharedWeights] = []

    def load() -> None:
        place = SharedWeights(file)
        for seed in range(20):
            assert torch.equal(place.keep(f"layers.{seed}", weight(seed)), weight(seed))
        found.append(place)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(place.shared, place.own) for place in found] == [(20 * weight(0).nbytes, 0)] * 4
    assert len({tuple(place._places.items()) for place in found}) == 1


# Of every kind of storage: floats, integers with scales, zero points, minima and levels; experts; recurrent layers.
SHARED = [
    "llama+",
    "llama-tied+w8a8",
    "qwen2+w4a16",
    "llama+w4a8",
    "llama+q4_k",
    "llama+fp8",
    "mixtral+w8a8",
    "mamba2+",
]


@needs_kernels
@pytest.mark.parametrize("name", SHARED)
def test_a_second_process_shares_all_but_small_ones(
    name: str, file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of these would be in processes of their own; with the bits of an LLM that shares nothing."""
    name, _, scheme = name.partition("+")
    row = TINY_MODELS[name]
    write_checkpoint(row, tmp_path)
    prompts, options = make_prompts(row), {"quantization": scheme or None}
    monkeypatch.setattr("llm.loading.shared_weights._SMALL", 0)
    with one_thread():
        expected = answers(tmp_path, row, prompts, **options)
        built: list[BuiltEngine] = []

        def build(args: LLMArgs) -> BuiltEngine:
            built.append(build_engine(args, file))
            return built[-1]

        monkeypatch.setattr("llm.llm.build_engine", build)
        assert [answers(tmp_path, row, prompts, **options) for _ in range(2)] == [expected] * 2
    first, second = (item.shared_bytes for item in built)
    assert first == second > 0.5 * sum(item.nbytes for item in load_file(tmp_path / "model.safetensors").values()) / 4
