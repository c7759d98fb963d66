"""The kernels' own threads: who computes what, several callers at once, forks, and the end of the threads."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from embedded import python
from kernel_sets import ISAS, kernel_set, needs_compiler
from thread_model import MORE_PER_WORKER, Region, tallest_of, tasks_of

from llm.kernels.cpu.library import Library

pytestmark = needs_compiler
TASKS = 64


def library_of(isa: str = ISAS[-1]) -> Library:
    found = kernel_set(isa).library
    assert found is not None
    return found


def ran_by(library: Library, threads: int, turns: int = 20_000, count: int = TASKS) -> tuple[int, Counter[int]]:
    """(workers of the pool, tasks by the system's number of the thread that ran them)."""
    found = torch.zeros(count, dtype=torch.int64)
    probe = library.function("llm_probe_threads")
    workers = probe(found.data_ptr(), count, turns, threads)
    return workers, Counter(found.tolist())


def end_threads(library: Library) -> None:
    library.end_threads()


def test_every_task_runs_once_on_at_most_so_many_threads() -> None:
    library = library_of()
    own = threading.get_native_id()
    for threads in (1, 2, 3, 5):
        for _ in range(20):
            workers, tasks = ran_by(library, threads)
            assert sum(tasks.values()) == TASKS and 0 not in tasks
            assert len(tasks) <= threads
            assert workers >= threads - 1
    assert set(ran_by(library, 1)[1]) == {own}


def regions_of(rows: int, n: int, k: int) -> int:
    """How many a GEMM opens on two threads."""
    library, kernels = library_of(), kernel_set(ISAS[-1])
    weight, x = kernels.op("pack")(torch.ones(n, k)), torch.ones(rows, k)
    count, threads = library.function("llm_count_regions"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = count()
        assert kernels.op("linear")(x, weight).eq(k).all()
        return count() - before
    finally:
        torch.set_num_threads(threads)


def test_what_a_region_costs_is_measured_once_and_small_gemms_open_none() -> None:
    library = library_of()
    ran_by(library, 2)
    cost = library.function("llm_region_ns")
    measured = cost()
    assert 0 < measured <= 20_000
    assert regions_of(64, 512, 512) == 1
    assert regions_of(1, 16, 16) == 0
    assert cost() == measured


def soon(regions: int, crowd: int = 0) -> bool:
    """Whether a GEMM of 44 us by the estimate opens so many before long, after `crowd` long regions each."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for _ in range(crowd):
            ran_by(library_of(), 3, turns=200_000)
        if regions_of(16, 256, 512) == regions:
            return True
    return False


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_on_cores_that_others_use_only_long_gemms_are_shared() -> None:
    """Three threads on one core are in each other's way, as other programs are."""
    library, cores = library_of(), os.sched_getaffinity(0)
    end_threads(library)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert soon(0, crowd=20)
        assert regions_of(128, 512, 512) == 1
    finally:
        end_threads(library)  # they have the affinity of the thread that created them
        os.sched_setaffinity(0, cores)
    assert soon(1)


def test_workers_take_part() -> None:
    """Tasks of milliseconds: the caller alone would be long enough for every worker to come."""
    assert max(len(ran_by(library_of(), 3, turns=2_000_000, count=30)[1]) for _ in range(5)) > 1


def test_callers_in_several_threads_compute_side_by_side() -> None:
    library, problems = library_of(), []

    def call() -> None:
        for _ in range(200):
            tasks = ran_by(library, 3, turns=50)[1]
            if sum(tasks.values()) != TASKS or 0 in tasks:
                problems.append(tasks)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert problems == []


def threads_of_process() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_ended_threads_are_gone_and_come_again() -> None:
    library = library_of()
    end_threads(library)
    for _ in range(20):
        before = threads_of_process()
        assert ran_by(library, 4)[0] == 3
        created = threads_of_process() - before
        assert len(created) == 3
        end_threads(library)
        deadline = time.monotonic() + 600
        while created & threads_of_process() and time.monotonic() < deadline:
            time.sleep(0.001)  # on a busy machine a joined thread stays in /proc for a moment
        assert not created & threads_of_process()


SLEEP = """
import time, torch
from llm import LLM, SamplingParams
torch.set_num_threads(3)
llm = LLM()
params = SamplingParams(temperature=0, max_tokens=4)
llm.generate(["In the beginning"] * 8, params, use_tqdm=False)
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before < 0.05)
"""


def test_nothing_runs_between_calls() -> None:
    done = python("-c", SLEEP, env={"OMP_WAIT_POLICY": "passive"})
    assert done.stdout == "True\n", done.stderr


FORK = """
import ctypes, os, signal, torch
from llm.kernels.cpu.library import choose_target, load_library
library = load_library(choose_target(None)[0])
probe = library.function("llm_probe_threads")
found = torch.zeros(64, dtype=torch.int64)
assert probe(found.data_ptr(), 64, 20000, 3) == 2
child = os.fork()
if not child:
    signal.alarm(60)  # it would wait for threads that do not exist
    found.zero_()
    os._exit(0 if probe(found.data_ptr(), 64, 20000, 3) == 2 and bool(found.all()) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), probe(found.data_ptr(), 64, 20000, 3))
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    done = python("-c", FORK)
    assert done.stdout == "0 2\n", done.stderr


def products(threads: int) -> list[torch.Tensor]:
    """GEMMs of several row tiles with weights of some kinds."""
    kernels, random = kernel_set(ISAS[-1]), torch.Generator().manual_seed(0)
    pack, linear = kernels.op("pack"), kernels.op("linear")
    floats, integers = torch.randn(333, 128, generator=random), torch.randint(-8, 8, (333, 128), generator=random)
    scale, x = torch.rand(333, 2, generator=random), torch.randn(70, 128, generator=random)
    weights = [pack(floats), pack(floats.bfloat16())]
    for kind in ("int8", "int4"):
        packed = pack(integers.to(torch.int8), kind)
        weights += [packed.scaled(scale, group_size=64)]
        weights += [replace(packed.scaled(scale[:, :1].contiguous(), group_size=128), activations="int8")]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [linear(x, weight) for weight in weights]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
@pytest.mark.parametrize("threads", [8, 32])
def test_threads_that_outnumber_cores_compute_the_same_and_do_not_spin(threads: int) -> None:
    """A processor of so many cores cuts work into so many parts: which of them wait for each other shows on two too."""
    library, cores = library_of(), os.sched_getaffinity(0)
    is_outnumbered, alone = library.function("llm_is_outnumbered"), products(1)
    end_threads(library)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        for _ in range(10):
            assert all(map(torch.equal, alone, products(threads)))
            assert is_outnumbered()
        assert ran_by(library, threads)[0] == threads - 1
        ran_by(library, min(2, len(cores)))
        assert not is_outnumbered()  # of as many threads as cores each may spin
    finally:
        end_threads(library)
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 896, 4096), (13, 896, 4096), (40, 100, 8200), (100, 48, 8200)])
def test_the_model_cuts_gemms_into_the_tasks_that_the_kernels_have(rows: int, n: int, k: int) -> None:
    """With threads enough, as many take part as there are tasks."""
    library, kernels = library_of(), kernel_set(ISAS[-1])
    weight, x, before = kernels.op("pack")(torch.ones(n, k)), torch.ones(rows, k), torch.get_num_threads()
    tasks = tasks_of(rows, n, k, tallest_of(kernels))
    assert 1 < tasks < 64
    end_threads(library)
    torch.set_num_threads(64)
    try:
        kernels.op("linear")(x, weight)
        assert ran_by(library, 1)[0] == tasks - 1
    finally:
        torch.set_num_threads(before)
        end_threads(library)


def test_the_model_knows_its_three_limits() -> None:
    """Tasks that are not enough for all threads, memory, and what a region costs."""
    compute, memory = Region(14, 14e-3, 1), Region(1000, 1.0, 10**9)
    assert [compute.seconds(threads, 1e12, 0) for threads in (1, 2, 7, 13, 14, 32)] == pytest.approx(
        [14e-3, 7e-3, 2e-3, 2e-3, 1e-3, 1e-3]
    )
    assert [memory.seconds(threads, 10e9, 0) for threads in (2, 8, 32)] == pytest.approx([0.5, 0.125, 0.1])
    costs = [Region(64, 0.0, 0, 3).seconds(threads, 1e9, 1e-6) for threads in (1, 2, 32)]
    assert costs == pytest.approx([0, 3e-6, 3e-6 * (1 + MORE_PER_WORKER * 30)])


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    kernels = kernel_set(ISAS[-1])
    x, weight = torch.randn(9, 130), kernels.op("pack")(torch.randn(333, 130))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = kernels.op("linear")(x, weight)
        torch.set_num_threads(threads)
        assert torch.equal(alone, kernels.op("linear")(x, weight))
    finally:
        torch.set_num_threads(before)
