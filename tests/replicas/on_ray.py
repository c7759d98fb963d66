"""Real Ray on this machine: ranks and replicas have the bits of one process, whoever is killed, and nothing stays.

    pip install '.[ray]'
    RAY_worker_niceness=0 PYTHONPATH=.:tests python tests/replicas/on_ray.py            # about two minutes

Not in CI, where there is no Ray. Exits 1 at the first difference. Ray starts workers with nice 15, which get little of
a machine that other programs keep busy: hence the variable.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from embedded import open_llm
from replicas.kills import seeded
from replicas.test_replicas import ALL, OPTIONS, PROMPTS, plain
from workers.test_workers import is_gone

from llm import LLM, ValidationError

PARAMS = seeded(ALL)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers(llm: LLM) -> list[Any]:
    return list(llm._engine._replicas.alive.values())  # type: ignore[union-attr]


def worker(llm: LLM) -> int:
    return int(workers(llm)[0].pid)


def rank(llm: LLM) -> int:
    return children(worker(llm))[0]


def actor(llm: LLM) -> int:
    """The process of Ray's that has started the worker."""
    return int(Path(f"/proc/{worker(llm)}/stat").read_text().rpartition(")")[2].split()[1])


def left() -> list[str]:
    """States of placement groups that there are."""
    return [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def run(llm: LLM, victim: Callable[[LLM], int] | None = None, number: int = signal.SIGKILL) -> list[Any]:
    killed: list[int] = []

    def kill(output: Any) -> None:
        if victim is not None and not killed:
            killed.append(victim(llm))
            os.kill(killed[0], number)

    found = plain(llm.generate(PROMPTS, PARAMS, use_tqdm=False, on_output=kill))
    return found if victim is None or killed else []


def main() -> None:
    os.environ["LLM_WORKER_TIMEOUT"] = "60"
    ray.init(num_cpus=4, include_dashboard=False)
    with open_llm(**OPTIONS) as llm:
        expected = run(llm)
    shared = {**OPTIONS, "num_threads": 1, "distributed_executor_backend": "ray"}
    for options in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2, "tensor_parallel_size": 2}):
        began = time.monotonic()
        with open_llm(**shared, **options) as llm:
            print(f"{options}: loaded in {time.monotonic() - began:.1f} s", flush=True)
            pids = [pid for each in workers(llm) for pid in (each.pid, *children(each.pid))]
            for name, victim in (("nobody", None), ("a rank", rank), ("a worker", worker), ("an actor", actor)):
                began = time.monotonic()
                if run(llm, victim) != expected:
                    sys.exit(f"{name} was killed: other outputs")
                print(f"  {name} killed: the same outputs after {time.monotonic() - began:.1f} s", flush=True)
            pids += [pid for each in workers(llm) for pid in (each.pid, *children(each.pid))]
        if not all(map(is_gone, pids)) or left():
            sys.exit(f"left behind: {left()}")
    try:
        with open_llm(**shared, tensor_parallel_size=8):
            sys.exit("8 ranks on 4 processors were not refused")
    except ValidationError as error:
        print(f"8 ranks: {error}")
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 4.0 and time.monotonic() < deadline:
        time.sleep(0.5)
    if ray.available_resources().get("CPU") != 4.0:
        sys.exit("processors are still held")
    print("nothing is left behind: no process, placement group or held processor")


if __name__ == "__main__":
    main()
