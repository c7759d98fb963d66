"""Are planted defects seen? Each one is put into a copy of the tree, and the tests named for it must fail.

    python tests/mutations/run.py                  # all, some twenty minutes on one core
    python tests/mutations/run.py -k scheduler     # those with this word in their name or file
    python tests/mutations/run.py --jobs 4
    python tests/mutations/run.py --record killed.txt    # stopped and started again, it goes on where it was

The defects are in the `*.mutants` files beside it, whose form `catalogue.py` states.
A defect is killed if its tests fail, run out of time or crash. Tests that fail without a defect prove nothing, so each
selection is first run on the clean tree; `--no-baseline` leaves that out. Exits 1 if a defect survived or was not run.
Nothing is written to the tree itself. Linux and macOS: each run is a fork of a process that has imported torch.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import os
import py_compile
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from catalogue import ROOT, Mutant, read_catalogue

# Of one selection of tests: processor time, and by the clock, on a machine that may be busy.
CPU_SECONDS, WALL_SECONDS = 300, 1800
DATA_BYTES = 6 << 30  # a defect may allocate without end
KILLED, SURVIVED, NOT_RUN, CLEAN = "killed", "SURVIVED", "NOT RUN", "clean"
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "shared"
)


@dataclass
class Tree:
    """A copy of the repository, in which one defect at a time is planted."""

    root: Path

    @classmethod
    def copy(cls, folder: Path) -> Tree:
        shutil.copytree(ROOT, folder, symlinks=True, ignore=_LEFT_OUT)
        # By hash: a defect of the same length, planted within a second, has the size and time of cached bytecode.
        compileall.compile_dir(folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        return cls(folder)

    def test(self, selection: str, log: Path) -> int:
        """Run pytest in a child process: its exit status, -1 if it ran out of time, -signal if it crashed."""
        child = os.fork()
        if child == 0:
            _run_pytest(self.root, selection, log)
        return _wait(child)

    def judge(self, mutant: Mutant, log: Path) -> str:
        path = self.root / mutant.file
        clean = path.read_text()
        path.write_text(mutant.apply(clean))
        try:
            status = self.test(mutant.tests, log)
        finally:
            path.write_text(clean)
        # 1: tests failed; 2: they could not be imported; negative: no answer in time, or a crash.
        return {0: SURVIVED, 1: KILLED, 2: KILLED}.get(status, KILLED if status < 0 else NOT_RUN)


class Record:
    """What runs before this one found, in a file or nowhere: a run of an hour may be stopped.

    A selection that passed without a defect, or a defect that was killed, is not run again. Both go by their names:
    after a change to the code or to the tests begin a new file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = set(path.read_text().splitlines()) if path is not None and path.exists() else set()

    def has(self, verdict: str, name: str) -> bool:
        return f"{verdict} {name}" in self._known

    def add(self, verdict: str, name: str) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{verdict} {name}\n")


def _run_pytest(root: Path, selection: str, log: Path) -> None:
    """In the child: never returns."""
    status = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path[0] = str(root)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=short", *shlex.split(selection)]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _wait(child: int) -> int:
    deadline = time.monotonic() + WALL_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def _import_what_is_slow() -> None:
    import hypothesis  # noqa: F401
    import torch
    import transformers  # noqa: F401

    for plugin in entry_points(group="pytest11"):
        plugin.load()
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", CI="true")  # CI: hypothesis draws the same examples every time
    gc.freeze()  # the children's collections leave these modules out


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Plant defects and see whether the tests notice.")
    parser.add_argument("-k", default="", metavar="WORD", help="only those with this word in their name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a defect first")
    parser.add_argument("--logs", type=Path, help="a folder for pytest's output")
    parser.add_argument("--record", type=Path, metavar="FILE", help="verdicts are added; what it says was killed stays")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_catalogue() if options.k in f"{mutant.name} {mutant.file}"]
    problems = [problem for mutant in mutants if (problem := mutant.problem(ROOT))]
    if problems or not mutants:
        print("\n".join(problems) or f"no defect has {options.k!r} in its name or file")
        return 1
    _import_what_is_slow()
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        bench = _Bench(Path(folder), logs, options.jobs)
        return _report(mutants, bench, not options.no_baseline, Record(options.record))


class _Bench:
    """`jobs` copies of the tree, and work handed out to them."""

    def __init__(self, folder: Path, logs: Path, jobs: int) -> None:
        self.logs = logs
        self._jobs = jobs
        self._free = [Tree.copy(folder / f"tree{index}") for index in range(jobs)]

    def map(self, work: Callable[[Tree, int], str], count: int) -> list[str]:
        def one(index: int) -> str:
            tree = self._free.pop()
            try:
                return work(tree, index)
            finally:
                self._free.append(tree)

        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(one, range(count)))


def _report(mutants: list[Mutant], bench: _Bench, baseline: bool, record: Record) -> int:
    before = [mutant for mutant in mutants if record.has(KILLED, mutant.title)]
    mutants = [mutant for mutant in mutants if mutant not in before]
    if baseline and (failing := _failing_selections(mutants, bench, record)):
        print("\n".join(failing))
        return 1

    def judge(tree: Tree, index: int) -> str:
        mutant, started = mutants[index], time.monotonic()
        verdict = tree.judge(mutant, bench.logs / f"{index}.log")
        print(f"{verdict:8} {time.monotonic() - started:5.0f}s  {mutant.title}", flush=True)
        record.add(verdict, mutant.title)
        return verdict

    counts = Counter(bench.map(judge, len(mutants)))
    killed, total = counts[KILLED] + len(before), len(mutants) + len(before)
    print(f"{killed} of {total} killed ({killed / total:.0%}), {counts[SURVIVED]} survived")
    return 0 if killed == total else 1


def _failing_selections(mutants: list[Mutant], bench: _Bench, record: Record) -> list[str]:
    selections = sorted({mutant.tests for mutant in mutants if not record.has(CLEAN, mutant.tests)})

    def clean(tree: Tree, index: int) -> str:
        status = tree.test(selections[index], log := bench.logs / f"baseline{index}.log")
        if status != 0:
            return f"{selections[index]}: fails without a defect\n{log.read_text()[-2000:]}"
        record.add(CLEAN, selections[index])
        return ""

    return [problem for problem in bench.map(clean, len(selections)) if problem]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
