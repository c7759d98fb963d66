"""Workers that Ray's actors start, with a stand-in for Ray; `tests/replicas/on_ray.py` tries them with Ray itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import pytest
from workers.echo_role import SCHEMA
from workers.pretend_ray import PretendRay, pretend_ray
from workers.test_workers import ROLE, is_gone

from llm.errors import MissingPackageError, ValidationError, WorkerDiedError
from llm.workers.on_ray import RayMachines, RayProcess, connected_ray
from llm.workers.process import WorkerProcess


@pytest.fixture
def ray() -> Iterator[PretendRay]:
    with pretend_ray() as ray:
        yield ray


def started(number: int = 0, environment: dict[str, str] | None = None) -> WorkerProcess:
    start = partial(RayProcess, ROLE, number, [{"CPU": 1}, {"CPU": 1}], environment or {})
    return WorkerProcess(ROLE, number, SCHEMA, start=start)


def test_messages_of_any_size_arrive_and_nothing_stays(ray: PretendRay, capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    worker = started(3, {"LLM_HERE": "there"})
    worker.send("who")
    answer = worker.receive()
    assert answer is not None
    number, pid, main, _, environment = answer.body  # type: ignore[misc]
    assert number == 3 and worker.pid == pid != os.getpid() and main.endswith("start.py")
    assert environment["LLM_HERE"] == "there"
    big = {"bytes": os.urandom(5 << 20)}
    worker.send("echo", big)
    assert worker.receive() == ("echo", big)
    worker.send("flood")
    assert all(worker.receive() == ("flood", bytes(1 << 20)) for _ in range(64))
    worker.send("print", "said there")
    assert worker.receive() == ("printed", None)
    group, actor = ray.groups[0], ray.actors[0]
    assert (group.strategy, group.bundles) == ("STRICT_PACK", [{"CPU": 1}] * 2)
    assert actor.options["num_cpus"] == 1 and actor.options["scheduling_strategy"] == (group, 0)
    worker.close()
    assert is_gone(pid) and not ray.groups and not ray.actors
    end = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/fd")) > descriptors + 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4, "the actor's, which would end with its process"
    assert "worker 3: said there" in capfd.readouterr().err


def test_every_end_is_told_in_a_sentence(ray: PretendRay) -> None:
    for kind, body, said in (
        ("fail", "of its role", "worker 0 failed:\nTraceback(.|\n)*RuntimeError: of its role"),
        ("exit", 7, "worker 0 died: it ended with exit status 7"),
    ):
        worker = started()
        worker.send(kind, body)
        with pytest.raises(WorkerDiedError, match=said):
            worker.receive()
    worker = started()
    worker.send("echo")
    worker.receive()
    ray.kill(ray.actors[0])
    with pytest.raises(
        WorkerDiedError, match=r"died: Ray says: The actor died unexpectedly before finishing this task\."
    ):
        worker.receive()
    assert is_gone(worker.pid)


def test_one_that_hangs_or_is_stopped_is_ended(ray: PretendRay) -> None:
    worker = started()
    worker.send("echo")
    worker.receive()
    worker.seconds = 0.2
    worker.send("hang")
    with pytest.raises(WorkerDiedError, match=r"has said nothing for [01] seconds"):
        worker.receive()
    assert is_gone(worker.pid)
    stopped = started()
    stopped.send("echo")
    stopped.receive()
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.kill()
    assert is_gone(stopped.pid)


def test_a_cluster_without_room(ray: PretendRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_WORKER_TIMEOUT", "0.4")
    ray.has_room = False
    worker = started()
    worker.send("echo")
    with pytest.raises(WorkerDiedError, match=r"no machine with 2 times 1 CPU free for 0 seconds"):
        worker.receive(watched=False)
    waiting = started()  # one that is closed meanwhile does not wait
    waiting.send("echo")
    began = time.monotonic()
    waiting.close()
    assert time.monotonic() - began < 5.0
    ray.has_room = True


def test_machines_that_are_too_small_are_refused(ray: PretendRay) -> None:
    ray.machines = ({"CPU": 2.0, "memory": 4e9}, {"CPU": 16.0, "memory": 3e9, "GPU": 1.0}, {"memory": 1.0})
    machines = RayMachines(connected_ray())
    assert ray.is_on and (machines.cpus, machines.memory) == (2, 3_000_000_000)
    assert [machines.most_of(count) for count in (1, 2, 5)] == [1, 1, 3]
    machines.check_room([{"CPU": 8}] * 2, "num_threads")
    with pytest.raises(ValidationError, match=r"need 18 CPU on one machine .* at most 16 CPU; lower") as caught:
        machines.check_room([{"CPU": 6}] * 3, "num_threads")
    assert caught.value.parameter == "num_threads"
    with pytest.raises(ValidationError, match="2 CPU and 2 GPU"):
        machines.check_room([{"CPU": 1, "GPU": 1}] * 2, "num_threads")


def test_without_ray() -> None:
    with patch.dict(sys.modules, {"ray": None}), pytest.raises(MissingPackageError, match=r"offline-llm\[ray\]"):
        connected_ray()
