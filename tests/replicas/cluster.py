"""How many replicas can one program feed? A simulation in events, with the costs of the program measured here.

    PYTHONPATH=.:tests python tests/replicas/cluster.py --replicas 1000 --rows 1e9

First the program's own work is timed, without replicas: to hand out a row, to take a report and each of its tokens, to
end a row and write it into the journal. Then replicas that compute a step in `--step` seconds for `--batch` rows of
`--tokens` tokens on average report to one program, which takes one report at a time. A replica whose rows have ended
waits for new ones: the places of its batch that are empty are the program's doing. Two knobs are turned: only each nth
step is reported, and the replicas are divided over several programs, as shards do. `--seconds` are simulated; the first
half, in which replicas have the rows that they began with, does not count.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from embedded import open_llm

from llm import SamplingParams
from llm.engine.rows import Row
from llm.engine.step import RunnerOutput
from llm.replicas.engine import ReplicatedEngine
from llm.replicas.processes import Replicas
from llm.replicas.schema import SCHEMA, EndedRow, StepReport
from llm.workers.messages import sizes_of

PROMPT, ANSWER, BATCH, ROUNDS = 512, 128, 64, 20


@dataclass(frozen=True)
class Costs:
    """Seconds of the program, and bytes of a row in the journal."""

    row: float
    report: float
    token: float
    end: float
    journal_bytes: int


class Sink(Replicas):
    """Replicas that take everything and say nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.alive = dict.fromkeys(range(count))  # type: ignore[assignment]
        self.count, self.sent = count, 0

    def send(self, number: int, kind: str, body: object = None) -> None:
        self.sent += len(SCHEMA.encode(kind, body))


def seconds_of(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def received(report: StepReport) -> StepReport:
    data = SCHEMA.encode("step", report)
    header, buffers = sizes_of(data[:16])
    body = SCHEMA.decode(memoryview(data)[16 : 16 + header], memoryview(data)[16 + header :]).body
    if not isinstance(body, StepReport) or len(data) != 16 + header + buffers:
        raise RuntimeError("a report arrived as something else")
    return body


def measured() -> Costs:
    """Of a run with plain sampling; the program's thread alone is timed."""
    with open_llm(max_model_len=1024) as llm:
        engine = ReplicatedEngine(llm.config, Sink(4), llm._engine.tokenizer, frozenset())  # type: ignore[union-attr]
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        rows = [
            Row(None, [5 + index] * PROMPT, params.clone(), seed=index, index=index) for index in range(BATCH * ROUNDS)
        ]
        states: list[Any] = []
        row = seconds_of(lambda: [states.append(engine.add(item)) or engine.scheduler.hand_out() for item in rows])
        held = list(engine.scheduler.dispatcher.held[0])[:BATCH]
        steps = {}
        for size in (1, len(held)):
            reports = [StepReport(RunnerOutput({name: [7] for name in held[:size]})) for _ in range(50)]
            sent = [SCHEMA.encode("step", report) for report in reports]
            del sent
            steps[size] = seconds_of(lambda given=reports: [engine._apply(0, received(item)) for item in given]) / 50
        token = (steps[len(held)] - steps[1]) / (len(held) - 1)
        left = {name: [7] * (ANSWER - 50 - (50 if name in held[:1] else 0)) for name in held}
        last = StepReport(RunnerOutput(left), ended={name: EndedRow(0, 0, 0) for name in held})
        engine._apply(0, received(last))
        ended = [state for state in states if state.finished]
        lines: list[str] = []

        def end() -> None:
            for state in ended:
                output = state.output()
                record = {"index": output.index, "text": output.outputs[0].text, "tokens": output.outputs[0].token_ids}
                lines.append(json.dumps(record))

        whole = seconds_of(end) / len(ended)
        return Costs(row / len(rows), steps[1] - token, token, whole, sum(map(len, lines)) // len(lines))


def simulated(costs: Costs, args: argparse.Namespace, seed: int = 1) -> tuple[float, float, float]:
    """(share of the batch's places that are filled, rows a second, share of the program's time) of one program."""
    rng, count = np.random.default_rng(seed), max(1, args.replicas // args.programs)
    room = args.batch + args.batch // 4
    held = [room] * count
    unreported, steps = [0] * count, [0] * count
    events = [(rng.uniform(0, args.step), index) for index in range(count)]
    heapq.heapify(events)
    handed: list[tuple[float, int, int]] = []  # (when, replica, rows) on their way
    free_at = busy = filled = possible = ended_rows = 0.0
    while events:
        now, index = heapq.heappop(events)
        if now > args.seconds:
            break
        while handed and handed[0][0] <= now:
            _, replica, rows = heapq.heappop(handed)
            held[replica] += rows
        running = min(held[index], args.batch)
        ended = int(rng.binomial(running, 1 / args.tokens))
        held[index] -= ended
        unreported[index] += ended
        steps[index] += 1
        counts = now > args.seconds / 2
        if counts:
            filled, possible, ended_rows = filled + running, possible + args.batch, ended_rows + ended
        if steps[index] % args.every == 0:
            tokens = running * args.every
            work = costs.report + costs.token * tokens + (costs.row + costs.end) * unreported[index]
            free_at = max(free_at, now) + work
            busy += work * counts
            if unreported[index]:
                heapq.heappush(handed, (free_at, index, unreported[index]))
            unreported[index] = 0
        heapq.heappush(events, (now + args.step, index))
    return filled / possible, ended_rows / (args.seconds / 2), min(1.0, busy / (args.seconds / 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--step", type=float, default=0.025)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    costs = measured()
    print(
        f"the program: {costs.row * 1e6:.0f} us a row that is handed out, {costs.report * 1e6:.0f} us a report and "
        f"{costs.token * 1e6:.1f} us each of its tokens, {costs.end * 1e6:.0f} us a row that has ended and "
        f"{costs.journal_bytes} bytes of it in the journal"
    )
    print("programs  every  places filled  rows/s  reports/s a program  busy  journal MB/s  days for all rows")
    for programs, every in ((1, 1), (1, 8), (8, 1), (8, 8), (16, 1), (125, 1)):
        args.programs, args.every = programs, every
        filled, rows, busy = simulated(costs, args)
        reports = args.replicas / programs / args.step / every
        print(
            f"{programs:8} {every:6} {filled:14.0%} {rows * programs:7,.0f} {reports:20,.0f} {busy:5.0%} "
            f"{rows * programs * costs.journal_bytes / 1e6:13.1f} {args.rows / max(rows * programs, 1) / 86400:18.2f}"
        )


if __name__ == "__main__":
    main()
