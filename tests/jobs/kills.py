"""Is a job that was killed and resumed the job that was not? Kills it at random moments until it has ended.

    python tests/jobs/kills.py                     # 200 kills, some five minutes on one core
    python tests/jobs/kills.py --kills 20 --seed 3

A run is a fork of this process, which has loaded the model. It gets SIGKILL, SIGTERM or SIGINT; sometimes the end of
its journal is torn afterwards, as by a power failure. Then it is resumed. At the end the output must be, to the byte,
that of a run that nothing interrupted, and no answer that was in the journal may have changed or gone, unless it was
torn off. Rows: n > 1, a grammar, logprobs, errors, prompts that are too long, short and long answers.

`test_jobs.py` calls its functions for a few moments. Exits 1 if an output differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm import LLM
from llm.jobs import journal
from llm.jobs.journal import decode

ROWS = 40
INTERRUPTED = 3  # the exit status of a run that a signal ended in good order
CHAT: dict[str, Any] = {
    "url": "/v1/chat/completions",
    "body": {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "old": {"type": "boolean"}},
                    "required": ["age", "old"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def body(index: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 30, "ignore_eos": True},
        {"max_tokens": 12, "n": 3},
        {"max_tokens": 8, "logprobs": 2},
        {"max_tokens": 40, "stop": ["the ", "and "], "min_tokens": 10},
        {"max_tokens": 3, "temperature": 0},
        {"max_tokens": 8, "nonsense": 1},
        {"max_tokens": 60, "ignore_eos": True, "seed": 7, "repetition_penalty": 1.3},
    ]
    prompt = "the king " * 200 if index % 11 == 5 else f"In the year {index} of the king"
    return {"model": "tiny", "prompt": prompt, **kinds[index % len(kinds)]}


def write_input(path: Path, rows: int = ROWS, chats: bool = False) -> None:
    """Completions, and every ninth row a chat with a grammar."""
    lines: list[dict[str, Any]] = []
    for index in range(rows):
        line = {"custom_id": f"row-{index}", "method": "POST", "url": "/v1/completions", "body": body(index)}
        lines.append(line | (CHAT if chats and index % 9 == 4 else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def open_llm() -> LLM:
    return LLM(max_model_len=96, max_num_seqs=4, num_threads=1)


def finished(journal: Path) -> dict[int, Any]:
    """The answers in a journal, by index."""
    if not journal.exists():
        return {}
    records = [decode(line) for line in journal.read_bytes().splitlines(keepends=True)]
    return {record["i"]: record["o"] for record in records if record is not None and "o" in record}


def run_once(llm: LLM, source: Path, target: Path, number: int, delay: float | None) -> bool:
    """Run or resume the job in a fork; sends it a signal after `delay` seconds. True if it ended by itself."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            journal.PARTIALS_SECONDS = 0.02
            llm.run(source, target, resume=True, use_tqdm=False)
            status = 0
        except KeyboardInterrupt:
            status = INTERRUPTED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, number)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, INTERRUPTED):
        raise RuntimeError("the job ended with an error")
    return status == 0


def tear(journal: Path, random_: random.Random) -> None:
    """What a power failure can do to the end of a file."""
    size, header = journal.stat().st_size, len(journal.read_bytes().partition(b"\n")[0]) + 1
    with journal.open("r+b") as file:
        if random_.random() < 0.5:
            file.truncate(max(header, size - random_.randrange(1, 400)))
        else:
            file.seek(max(header, size - random_.randrange(1, 400)))
            file.write(bytes(random_.randrange(256) for _ in range(random_.randrange(1, 60))))


@dataclass
class Report:
    kills: int = 0
    jobs: int = 0
    problems: int = 0


def one_job(
    llm: LLM, folder: Path, expected: bytes, seconds: float, random_: random.Random, tears: bool = True
) -> tuple[int, list[str]]:
    """Kill and resume one job until it ends; (number of kills, what went wrong)."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    journal = folder / "out.jsonl.journal"
    target.unlink(missing_ok=True)
    journal.unlink(missing_ok=True)
    problems, known, kills = [], {}, 0
    while not target.exists():
        if run_once(llm, source, target, random_.choice(_SIGNALS), random_.random() * seconds / 3) or target.exists():
            break
        kills += 1
        now = finished(journal)
        if journal.exists() and any(now.get(index) != answer for index, answer in known.items()):
            problems.append(f"after kill {kills}, a finished answer has changed or is lost")
        if tears and journal.exists() and random_.random() < 0.3:
            tear(journal, random_)
        known = finished(journal)
    if target.read_bytes() != expected:
        problems.append(f"after {kills} kills the output differs")
    return kills, problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    random_, report = random.Random(args.seed), Report()
    with tempfile.TemporaryDirectory() as name, open_llm() as llm:
        folder = Path(name)
        write_input(folder / "in.jsonl", chats=True)
        llm.chat(CHAT["body"]["messages"], use_tqdm=False)  # imports transformers before the forks
        started = time.monotonic()
        run_once(llm, folder / "in.jsonl", folder / "whole.jsonl", 0, None)
        seconds = time.monotonic() - started
        expected = (folder / "whole.jsonl").read_bytes()
        while report.kills < args.kills:
            kills, problems = one_job(llm, folder, expected, seconds, random_)
            report.jobs, report.kills = report.jobs + 1, report.kills + kills
            report.problems += len(problems)
            for problem in problems:
                print(f"job {report.jobs}: {problem}", flush=True)
    print(f"{report.kills} kills of {report.jobs} jobs of {ROWS} rows: {report.problems} problems")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
