"""Kill ranks at random moments, many times: the call ends with the rank's number, nothing hangs, nothing stays behind.

    PYTHONPATH=.:tests python tests/ranks/kills.py --rounds 200

A round opens an `LLM` with two ranks and calls it until, at a random moment of its loading or of its calls, the second
is killed, ended, crashed or stopped; what is raised must name rank 1 and say how it ended. In a fifth of the rounds the
program itself is killed, a process of its own then. After each the processes, file descriptors, threads, socket files
and shared memory must be as they were. Exits 1 at the first difference.

Other programs have shared memory and sockets too: `unshare -m sh -c 'mount -t tmpfs none /dev/shm && python ...'`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from embedded import PROMPTS, open_llm
from replicas.kills import overdue, traces
from workers.test_workers import is_gone

from llm import RankError, SamplingParams, WorkerDiedError

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP)
ROUND_SECONDS = 120
PARAMS = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
PROGRAM = "from ranks.kills import call_forever; call_forever()"


def call_forever(said: Counter[str] | None = None) -> None:
    with open_llm(tensor_parallel_size=2, num_threads=1) as llm:
        while True:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            if said is not None:
                said["calls"] += 1


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


class Killer(threading.Thread):
    """Sends a signal to the rank that this process has, so many seconds after it was started."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self._number, self._seconds = number, seconds

    def run(self) -> None:
        while not (found := children(os.getpid())):
            time.sleep(0.01)
        time.sleep(self._seconds)
        os.kill(found[0], self._number)


def rank_dies(rng: random.Random, said: Counter[str]) -> None:
    number = rng.choice(SIGNALS)
    said[number.name] += 1
    killer = Killer(number, rng.uniform(0, 5))
    killer.start()
    try:
        call_forever(said)
    except (WorkerDiedError, RankError) as error:
        how = ("said nothing", "did not come") if number == signal.SIGSTOP else (number.name,)
        if "rank 1" not in str(error) or not any(part in str(error) for part in how):
            raise
    killer.join()


def program_dies(rng: random.Random, said: Counter[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.DEVNULL) as program:
        while not (ranks := children(program.pid)):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 6))
        program.kill()
    said["programs"] += 1
    if not all(map(is_gone, ranks)):
        raise SystemExit(f"ranks {ranks} outlive their program")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ.setdefault("LLM_WORKER_TIMEOUT", "15")  # more where other programs have the processors
    signal.signal(signal.SIGALRM, overdue)
    rng, said, began = random.Random(args.seed), Counter[str](), time.monotonic()
    with open_llm(tensor_parallel_size=2, num_threads=1) as llm:  # what is made once per process is there from now on
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    before = traces()
    for done in range(1, args.rounds + 1):
        signal.alarm(ROUND_SECONDS)
        (program_dies if rng.random() < 0.2 else rank_dies)(rng, said)
        signal.alarm(0)
        end = time.monotonic() + 10  # threads that have seen the end are about to go
        gc.collect()  # the mapped memory of an LLM goes with the error that it was in
        while (now := traces()) != before and time.monotonic() < end:
            time.sleep(0.1)
        if now != before:
            raise SystemExit(f"left behind: {now}, before: {before}")
        print(f"{done} rounds in {time.monotonic() - began:.0f} s: {dict(said)}", flush=True)
    print(f"{args.rounds} rounds: every end was told, nothing hung, nothing left: {before}")


if __name__ == "__main__":
    main()
