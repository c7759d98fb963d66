"""What ranks gather through: a process group over gloo, whose ranks are threads here, and the way by the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from kernel_sets import needs_kernels
from ranks.gloo_role import GlooCommunicator, over_gloo

from llm.errors import RankError
from llm.layers.communicators import HostCommunicator, NcclCommunicator, _defaults
from llm.layers.parallel import Communicator, Rendezvous
from llm.platforms.cpu import CpuPlatform

SIZE = 2


def opened(kind: type[Communicator], folder: Path, seconds: float = 60.0) -> list[Any]:
    return [kind(rank, SIZE, Rendezvous(folder, seconds), CpuPlatform()) for rank in range(SIZE)]


def together(ranks: list[Any], call: Callable[[Any], Any]) -> list[Any]:
    """What each rank returns, or raises."""

    def guarded(rank: Any) -> Any:
        try:
            return call(rank)
        except RankError as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(guarded, ranks))


@pytest.fixture(params=[GlooCommunicator, pytest.param(HostCommunicator, marks=needs_kernels)])
def ranks(request: Any, tmp_path: Path) -> Iterator[list[Any]]:
    with over_gloo():
        found = opened(request.param, tmp_path)
        yield found
        for rank in found:
            rank.close()


def part(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, 3, 4], other numbers on each rank, one that is none among them."""
    values = torch.arange(24.0).view(2, 3, 4) + 100 * rank
    values[0, 0, rank] = torch.nan
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_has_the_parts_in_order(ranks: list[Any], dtype: torch.dtype) -> None:
    expected = torch.cat([part(0, dtype), part(1, dtype)], -1)
    for found in together(ranks, lambda rank: rank.all_gather(part(rank.rank, dtype))):
        assert found.dtype == dtype and torch.equal(found.float().nan_to_num(-1), expected.float().nan_to_num(-1))
    # Of rows that are not side by side in memory.
    columns = [part(rank, dtype)[..., 1:3] for rank in range(SIZE)]
    for found in together(ranks, lambda rank: rank.all_gather(columns[rank.rank])):
        assert torch.equal(found.float().nan_to_num(-1), torch.cat(columns, -1).float().nan_to_num(-1))


def test_a_row_is_its_owners(ranks: list[Any]) -> None:
    rows, owners = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(SIZE)], torch.tensor([1, 0, 1])
    for found in together(ranks, lambda rank: rank.pick(rows[rank.rank], owners)):
        assert found.tolist() == [[10.0, 11.0], [2.0, 3.0], [14.0, 15.0]]


def test_no_row_is_nothing_to_wait_for(ranks: list[Any]) -> None:
    assert [found.shape for found in together(ranks, lambda rank: rank.all_gather(torch.zeros(0, 4)))] == [(0, 8)] * 2


def test_a_step_that_is_given_up_is_left_by_who_waits_and_who_comes(ranks: list[Any]) -> None:
    """And the next one is as if nothing had been."""
    together(ranks, lambda rank: rank.all_gather(torch.ones(1, 1)))
    for late in range(2):  # the second time the ranks are only about to meet
        timer = threading.Timer(0.2, ranks[1].abort)
        timer.start()
        with pytest.raises(RankError):
            ranks[0].all_gather(torch.ones(1, 1))
        timer.join()
        for rank in ranks:
            with pytest.raises(RankError, match="another rank left the step"):
                rank.all_gather(torch.ones(1, 1))
        ranks[0].restart()
        if late:
            found = together(ranks, lambda rank: rank.all_gather(torch.full((1, 1), float(rank.rank))))
            assert [item.tolist() for item in found] == [[[0.0, 1.0]]] * 2


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with over_gloo():
        ranks = opened(GlooCommunicator, tmp_path, 0.3)
        with pytest.raises(RankError, match=r"rank 1 did not come to a step within 0\.3 seconds") as caught:
            ranks[0].all_gather(torch.ones(1, 1))
        assert caught.value.late == 1
        for rank in ranks:
            rank.close()


class Stuck:
    """A mark of a device that never gets there."""

    def query(self) -> bool:
        return False


def test_a_device_that_is_not_done_in_time_gives_the_step_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with over_gloo():
        ranks = opened(GlooCommunicator, tmp_path, 0.3)
        together(ranks, lambda rank: rank.all_gather(torch.ones(1, 1)))
        ranks[0].watch()  # nothing is marked: the host has waited
        ranks[0].check()
        monkeypatch.setattr(GlooCommunicator, "mark", lambda self: Stuck())
        ranks[0].watch()
        ranks[0].check()
        until = monotonic() + 30
        with pytest.raises(RankError, match="rank 1 did not come") as caught:
            while monotonic() < until:
                ranks[0].check()
        assert caught.value.late == 1
        with pytest.raises(RankError, match="another rank left the step"):
            ranks[1].check()
        ranks[0].restart()
        assert [len(found) for found in together(ranks, lambda rank: rank.all_gather(torch.ones(3, 1)))] == [3, 3]
        for rank in ranks:
            rank.close()


def test_a_group_that_takes_long_to_end_keeps_nobody_from_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's does while a graph refers to it."""
    ended, released = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, group: Any) -> None:
            self._allgather_base = group._allgather_base

        def abort(self) -> None:
            ended.set()
            released.wait(60)

    make_group = GlooCommunicator.make_group
    monkeypatch.setattr(GlooCommunicator, "make_group", lambda self, store: Slow(make_group(self, store)))
    with over_gloo():
        ranks = opened(GlooCommunicator, tmp_path, 0.3)
        try:
            together(ranks, lambda rank: rank.all_gather(torch.ones(1, 1)))
            ranks[0].abort()
            assert ended.wait(30)
            ranks[0].restart()
            together(ranks, lambda rank: rank.all_gather(torch.ones(1, 1)))
            monkeypatch.setattr(GlooCommunicator, "mark", lambda self: Stuck())
            ranks[0].watch()
            until = monotonic() + 30
            with pytest.raises(RankError, match="rank 1 did not come"):
                while monotonic() < until:
                    ranks[0].check()
        finally:
            released.set()
            for rank in ranks:
                rank.close()


def test_a_closed_rank_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with over_gloo():
        ranks = opened(GlooCommunicator, tmp_path)
        together(ranks, lambda rank: rank.all_gather(torch.ones(1, 1)))
        for rank in ranks:
            rank.close()
        until = monotonic() + 30
        while threading.active_count() > before and monotonic() < until:
            threading.Event().wait(0.01)
    assert threading.active_count() <= before


def test_nccl_gets_the_loopback_interface_unless_the_user_has_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with _defaults(NcclCommunicator._ENVIRONMENT):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    with _defaults(NcclCommunicator._ENVIRONMENT):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
