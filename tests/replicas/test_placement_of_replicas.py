"""`data_parallel_size` and `devices`: which processors, threads and devices a replica gets.

NUMA nodes are folders here: no test ran on a machine that has several.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_sets import needs_kernels

import llm.platforms
from llm import LLM
from llm.base import system
from llm.config.engine import LLMArgs
from llm.errors import ValidationError
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum
from llm.replicas.placement import Placement, node_of, numa_nodes, of_nodes, placements, shown
from llm.replicas.start import memory_of_one, shared_by
from llm.setup.ranks import place_ranks


def places(root: Path = Path("/"), **options: object) -> list[Placement]:
    return placements(LLMArgs("model", device="cpu", **options), root)  # type: ignore[arg-type]


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(system, "cores", lambda: set(range(8)))
    for node, text in enumerate(["0-1,4-5\n", "2-3,6-7\n", "8-15\n"]):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    (tmp_path / "sys/devices/system/node/possible").write_text("0-2\n")
    return tmp_path


def test_one_is_none() -> None:
    assert places() == [] and places(data_parallel_size=1) == []


def test_processors_are_shared_out(eight_cores: Path) -> None:
    assert places(data_parallel_size=3) == [
        Placement("cpu", (0, 1, 2), 3),
        Placement("cpu", (3, 4), 2),
        Placement("cpu", (5, 6, 7), 3),
    ]
    assert places(data_parallel_size=2, num_threads=1)[1] == Placement("cpu", (4, 5, 6, 7), 1)
    # More replicas than processors: they take turns.
    assert places(data_parallel_size=9) == [Placement("cpu", None, 1)] * 9
    assert str(places(data_parallel_size=2)[0]) == "cpu, processors 0-3, 4 threads"


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices "many:0" to "many:3"."""

    class Many(CpuPlatform):
        name, device_type, kind = "many", "many", PlatformEnum.OOT

        def torch_module(self) -> SimpleNamespace:
            return SimpleNamespace(device_count=lambda: 4)

    monkeypatch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, Many))


def on_many(**options: object) -> list[tuple[str, ...]]:
    """The devices of each replica, or () and those of the ranks of this process."""
    args = LLMArgs("model", **{"device": "many", **options})  # type: ignore[arg-type]
    found = placements(args)
    return [place.devices or (place.device,) for place in found] or [(), place_ranks(args, found)]


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"tensor_parallel_size": 2}, [(), ("many:0", "many:1")]),
        ({"tensor_parallel_size": 2, "device": "many:2"}, [(), ("many:2", "many:3")]),
        ({"tensor_parallel_size": 2, "devices": ["many:3", "many:1"]}, [(), ("many:3", "many:1")]),
        ({"tensor_parallel_size": 2, "devices": ["many:1", "many:1"]}, [(), ("many:1", "many:1")]),
        ({"tensor_parallel_size": 2, "devices": "all"}, [("many:0", "many:1"), ("many:2", "many:3")]),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, [("many:0", "many:1"), ("many:2", "many:3")]),
        ({"tensor_parallel_size": 3, "devices": "all"}, [(), ("many:0", "many:1", "many:2")]),
        ({"data_parallel_size": 2}, [("many:0",), ("many:1",)]),
        ({"devices": ["many:2"]}, [("many:2",)]),
        ({"device": "cpu", "tensor_parallel_size": 2}, [(), ("cpu", "cpu")]),
    ],
)
def test_ranks_have_a_device_each(four_gpus: None, options: dict[str, object], devices: list[tuple[str, ...]]) -> None:
    assert on_many(**options) == devices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 5}, r"needs as many devices, from many:0 on, and there are 4; devices="),
        ({"tensor_parallel_size": 2, "device": "many:3"}, r"from many:3 on, and there are 4"),
        ({"tensor_parallel_size": 2, "devices": ["many:0"] * 3}, "a multiple of tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "devices": ["many:0", "cpu:0"]}, "of one kind"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, "at most 2: there are 4 devices many for groups of 2"),
    ],
)
def test_devices_that_ranks_cannot_have(four_gpus: None, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        on_many(**options)


def test_nodes_have_a_replica_each(eight_cores: Path) -> None:
    assert numa_nodes(set(range(8)), eight_cores) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert places(eight_cores, devices="all") == [Placement("cpu", (0, 1, 4, 5), 4), Placement("cpu", (2, 3, 6, 7), 4)]
    assert numa_nodes({2}, eight_cores) == [[2]] and numa_nodes({1, 0}, eight_cores / "none") == [[0, 1]]
    assert shown([0, 1, 4, 5, 9]) == "0-1,4-5,9"


def test_an_llm_on_several_nodes_says_what_they_could_do(eight_cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = of_nodes
    assert own(None, eight_cores / "none") == "" and own(4, eight_cores) == ""
    monkeypatch.setattr("llm.setup.build.of_nodes", lambda threads: own(threads, eight_cores))
    with LLM(max_model_len=64) as llm:
        assert "on all of 2 NUMA nodes: devices='all' has a replica on each" in llm.config.reasons["num_threads"]


@needs_kernels
def test_replicas_of_a_node_share_their_weights(eight_cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica plans with its part of what the weights leave, which each node has once."""
    found = [node_of(place, eight_cores) for place in places(eight_cores, devices=[{0, 4}, {1}, {3, 6}, {1, 2}, "cpu"])]
    assert found == [0, 0, 1, -1, -1]
    platform = CpuPlatform()
    monkeypatch.setattr("llm.replicas.start.node_of", lambda place: node_of(place, eight_cores))
    four = places(eight_cores, devices=[{0}, {1}, {2}, {3}])
    assert shared_by(platform, four) == [0, 0, 1, 1]
    assert memory_of_one(platform, four, 1000, 100) == 100 + (1000 - 2 * 100) // 4
    assert memory_of_one(platform, four[:2], 1000, 100) == 100 + (1000 - 100) // 2
    assert memory_of_one(platform, four, 150, 100) < 100, "two nodes have no room for two"
    monkeypatch.setattr(system, "has_unnamed_files", lambda: False)
    assert shared_by(platform, four) == [] and memory_of_one(platform, four, 1000, 100) == 250


def test_one_node_is_no_reason_for_replicas(eight_cores: Path) -> None:
    assert places(eight_cores / "none", devices="all") == []


def test_sets_of_processors_are_taken_as_they_are(eight_cores: Path) -> None:
    assert places(devices=[{0, 1}, range(2, 8)]) == [
        Placement("cpu", (0, 1), 2),
        Placement("cpu", (2, 3, 4, 5, 6, 7), 6),
    ]
    assert places(devices=[{0}], data_parallel_size=1) == [Placement("cpu", (0,), 1)]
    assert places(devices=["cpu", "cpu"]) == [Placement("cpu")] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer of at least 1"),
        ({"data_parallel_size": True}, "data_parallel_size"),
        ({"devices": "both"}, "devices must be 'all', or a list of devices"),
        ({"devices": []}, "devices must be 'all'"),
        ({"devices": [3]}, "devices must be 'all'"),
        ({"devices": [{0, 9}]}, "sets of the processors 0-7"),
        ({"devices": [set()]}, "sets of the processors 0-7"),
        ({"devices": [{0}, {1}], "data_parallel_size": 3}, "left out, or 2, the number of devices"),
        ({"devices": ["cuda:0", "cuda:1"]}, "device='cuda:0' cannot be used"),
    ],
)
def test_what_is_wrong_is_told(options: dict[str, object], said: str, eight_cores: Path) -> None:
    with pytest.raises(ValidationError, match=said):
        places(**options)


def test_a_plan_is_of_each_of_them() -> None:
    one, two = (LLM.plan(device="cpu", data_parallel_size=size) for size in (1, 2))
    assert two.fits and len(two.replicas) == 2 and not one.replicas
    assert "replicas           2, each as follows: cpu" in str(two)
    assert two.shares_weights == ("MiB, in memory once for the replicas of a NUMA node;" in str(two))
    assert two.weight_bytes == one.weight_bytes
    assert one.free_bytes / 4 < two.free_bytes < one.free_bytes * 3 / 4  # half, and the machine is not idle


def test_the_processors_are_those_that_this_process_may_use() -> None:
    (place,) = {place.cores for place in places(devices=[sorted(os.sched_getaffinity(0))])}
    assert place == tuple(sorted(os.sched_getaffinity(0)))
