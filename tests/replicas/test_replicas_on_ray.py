"""Replicas with ranks, by Ray (a stand-in) and on this machine: the bits of one process, whatever dies."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import open_llm
from kernel_sets import needs_kernels
from replicas.test_replicas import ALL, OPTIONS, PROMPTS, plain
from workers.pretend_ray import PretendRay, pretend_ray
from workers.test_workers import is_gone

from llm import ValidationError
from llm.config.engine import LLMArgs
from llm.platforms.cpu import CpuPlatform
from llm.replicas.placement import Placement, placements
from llm.replicas.start import memory_of_one, shared_by


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with open_llm(**OPTIONS) as llm:
        return plain(llm.generate(PROMPTS, ALL, use_tqdm=False))


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def placed(**options: Any) -> list[Placement]:
    return placements(LLMArgs("model", device="cpu", **options))


@pytest.fixture
def ray() -> Iterator[PretendRay]:
    with pretend_ray({"CPU": 8.0, "memory": 8e9}, {"CPU": 32.0, "memory": 9e9}) as ray:
        yield ray


def test_where_replicas_of_ray_are(ray: PretendRay) -> None:
    found = placed(distributed_executor_backend="ray", data_parallel_size=3, tensor_parallel_size=2)
    assert found == [Placement("cpu", None, 2, 2, is_on_ray=True)] * 3  # two of them on one machine of eight
    assert found[0].bundles == [{"CPU": 2}, {"CPU": 2}] and str(found[0]) == "cpu, 2 threads, 2 ranks by Ray"
    assert placed(distributed_executor_backend="ray") == [Placement("cpu", None, 8, is_on_ray=True)]
    assert Placement("cuda:0", is_on_ray=True).bundles == [{"CPU": 1, "GPU": 1}]
    assert memory_of_one(CpuPlatform(), found, 1, 100) == 4_000_000_000 and shared_by(CpuPlatform(), found) == []
    assert placed(distributed_executor_backend="mp") == placed(distributed_executor_backend="uni") == []
    for options, said in (
        ({"devices": "all"}, "devices must be left out"),
        ({"num_threads": 20, "tensor_parallel_size": 2}, "need 40 CPU on one machine .* at most 32 CPU"),
    ):
        with pytest.raises(ValidationError, match=said):
            placed(distributed_executor_backend="ray", **options)
    with pytest.raises(ValidationError, match="'uni' or 'mp' or 'ray', got 'dask'"):
        placed(distributed_executor_backend="dask")


@needs_kernels
def test_ranks_on_ray_have_the_bits_of_one_process(ray: PretendRay, expected: list[Any]) -> None:
    options = {**OPTIONS, "distributed_executor_backend": "ray", "tensor_parallel_size": 2, "num_threads": 1}
    with open_llm(**options) as llm:
        assert [group.bundles for group in ray.groups] == [[{"CPU": 1}] * 2]
        assert plain(llm.generate(PROMPTS, ALL, use_tqdm=False)) == expected
        assert llm.config.reasons["replicas"] == "0: cpu, 1 thread, 2 ranks by Ray"
    assert not ray.groups and not ray.actors


@needs_kernels
def test_a_replica_that_loses_a_rank_loses_no_row(expected: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    options = {**OPTIONS, "devices": [range(1), range(1)], "tensor_parallel_size": 2}
    with open_llm(**options) as llm:
        replicas: dict[int, Any] = llm._engine._replicas.alive  # type: ignore[union-attr]
        ranks = [rank for worker in replicas.values() for rank in children(worker.pid)]
        assert len(ranks) == 2
        told: list[int] = []

        def kill(output: Any) -> None:
            if not told:
                os.kill(ranks[0], signal.SIGKILL)
            told.append(output.index)

        with caplog.at_level(logging.WARNING, "llm"):
            outputs = llm.generate(PROMPTS, ALL, use_tqdm=False, on_output=kill)
        assert plain(outputs) == expected
        assert "failed: rank 1 died: it was ended by SIGKILL" in caplog.text
        ranks += [rank for worker in replicas.values() for rank in children(worker.pid)]
    assert all(map(is_gone, ranks))
