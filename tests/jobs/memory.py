"""Is memory flat while a million rows stream through? `generate_iter` and `run`, with a runner that computes nothing.

    PYTHONPATH=. python tests/jobs/memory.py                       # a million rows, some minutes
    PYTHONPATH=. python tests/jobs/memory.py --rows 100000 --job   # a job of a file, with its journal

Prints the resident memory as rows go by, and exits with 1 if it grew by more than 8 MiB after the first tenth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from llm import LLM, SamplingParams
from llm.engine.step import RunnerOutput

LIMIT = 8 << 20
PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class NoRunner:
    """Samples token 65 for each row."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def execute(self, plan: Any) -> RunnerOutput:
        return RunnerOutput(sampled_token_ids={name: [65] for name in plan.num_scheduled_tokens})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Watch:
    """Resident memory at every tenth of the rows."""

    def __init__(self, rows: int) -> None:
        self._every, self._started = max(1, rows // 10), perf_counter()
        self.seen: list[int] = []

    def row(self, number: int) -> None:
        if number and number % self._every == 0:
            self.seen.append(resident())
            seconds = perf_counter() - self._started
            print(f"{number:>10,} rows  {self.seen[-1] / 2**20:8.1f} MiB  {seconds:6.1f} s", flush=True)

    def grown(self) -> int:
        return max(self.seen[1:]) - self.seen[0]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def prompts(rows: int, watch: Watch) -> Iterator[dict[str, list[int]]]:
    for number in range(rows):
        watch.row(number)
        yield {"prompt_token_ids": [number % 250 + 1, number // 250 % 250 + 1, number // 62500 + 1]}


def job(llm: LLM, rows: int, watch: Watch, folder: Path) -> None:
    with (folder / "in.jsonl").open("w") as file:
        file.writelines(f'{{"prompt": "{number}"}}\n' for number in range(rows))
    done = [0]

    def tell(progress: Any) -> None:
        while done[0] < progress.done:
            done[0] += 1
            watch.row(done[0])

    llm.run(folder / "in.jsonl", folder / "out.jsonl", PARAMS, use_tqdm=tell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--job", action="store_true", help="of LLM.run; otherwise of generate_iter")
    given = parser.parse_args()
    watch = Watch(given.rows)
    with LLM(max_model_len=32) as llm, tempfile.TemporaryDirectory() as folder:
        engine: Any = llm._engine
        engine.runner = NoRunner(engine.runner)
        if given.job:
            job(llm, given.rows, watch, Path(folder))
        else:
            count = sum(1 for _ in llm.generate_iter(prompts(given.rows, watch), PARAMS))
            assert count == given.rows
    print(f"grown by {watch.grown() / 2**20:.1f} MiB after the first tenth")
    return int(watch.grown() > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
