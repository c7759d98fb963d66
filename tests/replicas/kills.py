"""Kill replicas at random moments of calls, many times: nothing is lost, nothing hangs, nothing stays behind.

    PYTHONPATH=.:tests python tests/replicas/kills.py --rounds 200

A round is a call of 24 rows with every kind of sampling, or a flow of them, of which a random replica is killed, ended,
crashed or stopped meanwhile, whether it computes or loads in the place of a dead one. Its outputs must be those of one
process, to the bit. Every few rounds all replicas die, and those that follow them, which must end the call with one
sentence; then processes, file descriptors, threads, socket files and shared memory must be as they were. A third of the
rounds is interrupted too with `--ctrl-c`. Exits 1 at the first difference.

Other programs have shared memory and sockets too: `unshare -m sh -c 'mount -t tmpfs none /dev/shm && python ...'`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from replicas.test_replicas import ALL, OPTIONS, PROMPTS, plain

from llm import LLM, GenerationInterrupted, WorkerDiedError
from llm.workers.process import WorkerProcess

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP)
REPLICAS = 3
ROUNDS = 8  # of one `LLM`, fewer than its replicas are started again
CALL_SECONDS = 120


def open_llm(count: int) -> LLM:
    return LLM(**OPTIONS, num_threads=1, data_parallel_size=count)


def traces() -> dict[str, int]:
    """What a process leaves behind if it is not careful."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {
        "children": len(children),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared memory": len(os.listdir("/dev/shm")),
        "sockets": sum(path.is_socket() for path in Path("/tmp").iterdir()),
    }


def seeded(params: list[Any]) -> list[Any]:
    """With a seed in each, so that the number of the call does not matter."""
    found = [item.clone() for item in params]
    for index, item in enumerate(found):
        item.seed = index
    return found


class Killer(threading.Thread):
    """Kills one replica after a while."""

    def __init__(self, pid: int, number: int, seconds: float) -> None:
        super().__init__()
        self._pid, self._number, self._seconds = pid, number, seconds

    def run(self) -> None:
        time.sleep(self._seconds)
        with suppress(ProcessLookupError):  # one that was ended in another round
            os.kill(self._pid, self._number)


def workers_of(llm: LLM) -> list[WorkerProcess]:
    """Those that compute, and those that load."""
    replicas = llm._engine._replicas  # type: ignore[union-attr]
    return [*replicas.alive.values(), *replicas._loading.values()]


def one_round(llm: LLM, rng: random.Random, expected: list[Any], ctrl_c: bool, said: Counter[str]) -> None:
    workers = workers_of(llm)
    pid, number = rng.choice(workers).pid, rng.choice(SIGNALS)
    killers = [Killer(pid, number, rng.uniform(0, 0.5))]
    interrupted = ctrl_c and rng.random() < 0.33
    if interrupted:
        killers.append(Killer(os.getpid(), signal.SIGINT, rng.uniform(0, 0.5)))
    said[signal.Signals(number).name] += 1
    for killer in killers:
        killer.start()
    params = seeded(ALL)
    outputs: list[Any] = []
    try:
        if rng.random() < 0.5:
            outputs = plain(llm.generate(PROMPTS, params, use_tqdm=False))
        else:
            outputs = sorted(plain(llm.generate_iter(iter(PROMPTS), iter(params))))
    except GenerationInterrupted as error:
        said["interrupted"] += 1
        done = plain(output for output in error.outputs if output.finished)
        if any(item not in expected for item in done):
            raise SystemExit("an output of an interrupted call is another") from None
    except KeyboardInterrupt:
        said["interrupted between calls"] += 1
    else:
        if outputs != expected:
            raise SystemExit("the outputs are others than those of one process")
    for killer in killers:
        try:
            killer.join()
        except KeyboardInterrupt:
            said["interrupted between calls"] += 1
            killer.join()
    scheduler = llm._engine.scheduler  # type: ignore[union-attr]
    scheduler.check_integrity()
    said["in the middle of requests"] += scheduler.num_preemptions > 0
    scheduler.num_preemptions = 0


def all_die(llm: LLM) -> None:
    """Every replica is killed, and every one that is started in its place."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            for worker in workers_of(llm):
                if worker.is_alive:
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        llm.generate(PROMPTS * 8, seeded(ALL * 8), use_tqdm=False)
    except WorkerDiedError as error:
        if f"all {REPLICAS} replicas have died" not in str(error):
            raise
        return
    finally:
        over.set()
        killer.join()
    raise SystemExit("a call went on without replicas")


def overdue(number: int, frame: object) -> None:
    raise SystemExit(f"a call hangs, after {CALL_SECONDS} seconds")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ctrl-c", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("LLM_WORKER_TIMEOUT", "15")  # more where other programs have the processors
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, overdue)
    rng, said, began = random.Random(args.seed), Counter[str](), time.monotonic()
    with LLM(**OPTIONS, num_threads=1) as one:
        expected = sorted(plain(one.generate(PROMPTS, seeded(ALL), use_tqdm=False)))
    with open_llm(2) as two:  # what is made once per process is there from now on
        two.generate(PROMPTS[:2], use_tqdm=False)
    before, done = traces(), 0
    while done < args.rounds:
        llm = open_llm(REPLICAS)
        for _ in range(min(ROUNDS, args.rounds - done)):
            signal.alarm(CALL_SECONDS)
            one_round(llm, rng, expected, args.ctrl_c, said)
            done += 1
            print(f"{done} rounds in {time.monotonic() - began:.0f} s: {dict(said)}", flush=True)
        if rng.random() < 0.5:
            all_die(llm)
            said["all dead"] += 1
        signal.alarm(0)
        llm.close()
        del llm
        if traces() != before:
            raise SystemExit(f"left behind: {traces()}, before: {before}")
    print(f"{done} rounds: nothing lost, nothing hung, nothing left: {before}")


if __name__ == "__main__":
    main()
