"""Running workloads and turning times into figures with their floors.

Owns the protocol. The prefill of a stream is a separate run, with other ids and one new token. The rest of the whole
run's time is divided by the number of decode steps. A batch is measured by its wall time.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from llm.engine.boundary import Phase, Rates
from llm.engine.stats import EngineStats
from llm.llm import LLM
from llm.runner.inspection import ModelCost
from llm.sampling_params import SamplingParams
from llm.tools.bench.calibrate import CpuWatch
from llm.tools.bench.workloads import PREFILL_REPS, Workload, make_workload

Tokens = list[list[int]]


class Contestant(Protocol):
    """An engine that can run a workload."""

    name: str

    def generate(self, prompts: Tokens, max_tokens: int) -> Tokens:
        """Continue every prompt greedily by exactly `max_tokens` tokens."""

    def stats(self) -> EngineStats:
        """Counters so far; zeros for an engine without counters."""


class Ours:
    """This engine as a contestant."""

    name = "llm"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.vocab_size = llm.config.model_config.vocab_size

    def generate(self, prompts: Tokens, max_tokens: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(rows, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def stats(self) -> EngineStats:
        return self.llm.stats()


@dataclass
class Run:
    """One repetition of a workload.

    Attributes:
        seconds: of the whole run.
        prefill_seconds: of a stream's separate prefill run; None for a batch.
        stats: the engine's counters for the whole run.
        other_cores: cores that other processes used during the run; None: unknown.
    """

    workload: Workload
    seconds: float
    prefill_seconds: float | None
    outputs: Tokens
    stats: EngineStats
    other_cores: float | None

    @property
    def step_seconds(self) -> float:
        """Seconds per decode step of a stream."""
        return (self.seconds - (self.prefill_seconds or 0.0)) / max(1, self.workload.recipe.max_tokens - 1)


@dataclass(frozen=True)
class Figure:
    """A measured quantity.

    Attributes:
        values: one per repetition.
        floor: the best the machine allows; None: unknown.
        higher_is_better: False for times.
    """

    unit: str
    values: tuple[float, ...]
    floor: float | None = None
    higher_is_better: bool = False

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def share(self) -> float | None:
        """How close the median is to the floor; 1: equal."""
        if self.floor is None:
            return None
        return self.median / self.floor if self.higher_is_better else self.floor / self.median


def run_workload(contestant: Contestant, name: str, rep: int, vocab_size: int) -> Run:
    """Run one repetition; ids are folded into `vocab_size`."""
    workload = make_workload(name, rep, vocab_size)
    prefill = None
    with CpuWatch() as watch:
        if workload.recipe.is_stream:
            prompts = make_workload(name, rep + PREFILL_REPS, vocab_size).prompts
            prefill = _timed(contestant, prompts, 1)[0]
        before = contestant.stats()
        seconds, outputs = _timed(contestant, workload.prompts, workload.recipe.max_tokens)
    stats = _difference(contestant.stats(), before)
    return Run(workload, seconds, prefill, outputs, stats, watch.other_cores)


def speed_figures(runs: Sequence[Run], cost: ModelCost, rates: Rates | None) -> dict[str, Figure]:
    """Prefill and step times of a stream, throughput of a batch."""
    workload = runs[0].workload
    if rates is None:
        return _stream_figures(runs, None, None) if workload.recipe.is_stream else _batch_figures(runs, None)
    prefill = prefill_cost(cost, workload).floor_seconds(rates)
    decode = decode_cost(cost, workload).floor_seconds(rates)
    if workload.recipe.is_stream:
        return _stream_figures(runs, prefill, decode)
    return _batch_figures(runs, prefill + decode)


def engine_figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """The engine's own time: everything but forward, LM head and sampler."""
    steps = [max(1, run.stats.steps) for run in runs]
    own = [run.stats.seconds - run.stats.model_seconds for run in runs]
    outside = [run.seconds - run.stats.seconds for run in runs]
    return {
        "steps": Figure("", tuple(map(float, steps))),
        "step": Figure("ms", tuple(1e3 * run.stats.seconds / n for run, n in zip(runs, steps, strict=True))),
        "own_per_step": Figure("ms", tuple(1e3 * seconds / n for seconds, n in zip(own, steps, strict=True))),
        "own_share": Figure("%", tuple(100 * s / run.stats.seconds for s, run in zip(own, runs, strict=True))),
        "outside_steps": Figure("ms", tuple(1e3 * seconds for seconds in outside)),
    }


def _stream_figures(runs: Sequence[Run], prefill: float | None, decode: float | None) -> dict[str, Figure]:
    steps = max(1, runs[0].workload.recipe.max_tokens - 1)
    rows = len(runs[0].workload.prompts)
    step_floor = None if decode is None else decode / steps
    return {
        "prefill": Figure("ms", tuple(1e3 * (run.prefill_seconds or 0.0) for run in runs), _times(prefill, 1e3)),
        "step": Figure("ms", tuple(1e3 * run.step_seconds for run in runs), _times(step_floor, 1e3)),
        "decode": Figure("tok/s", tuple(rows / run.step_seconds for run in runs), _per(rows, step_floor), True),
    }


def _batch_figures(runs: Sequence[Run], floor: float | None) -> dict[str, Figure]:
    workload = runs[0].workload
    total = workload.prompt_tokens + workload.output_tokens
    return {
        "seconds": Figure("s", tuple(run.seconds for run in runs), floor),
        "output": _rate_figure(workload.output_tokens, runs, floor),
        "total": _rate_figure(total, runs, floor),
    }


def _rate_figure(tokens: int, runs: Sequence[Run], floor: float | None) -> Figure:
    return Figure("tok/s", tuple(tokens / run.seconds for run in runs), _per(tokens, floor), True)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor


def _per(count: int, seconds: float | None) -> float | None:
    return None if seconds is None else count / seconds


def _timed(contestant: Contestant, prompts: Tokens, max_tokens: int) -> tuple[float, Tokens]:
    started = perf_counter()
    outputs = contestant.generate(prompts, max_tokens)
    return perf_counter() - started, outputs


def _difference(after: EngineStats, before: EngineStats) -> EngineStats:
    changes: dict[str, Any] = {
        item.name: getattr(after, item.name) - getattr(before, item.name) for item in dataclasses.fields(EngineStats)
    }
    return EngineStats(**changes)


def prefill_cost(model: ModelCost, workload: Workload) -> Phase:
    """All prompts in one pass over the weights, a shared prefix once, and one sampled token per prompt."""
    shared = workload.recipe.shared_prefix
    spans = [(shared if row else 0, len(prompt)) for row, prompt in enumerate(workload.prompts)]
    return Phase(model.operations(spans, len(spans)), model.bytes_per_step)


def decode_cost(model: ModelCost, workload: Workload) -> Phase:
    """The tokens after the first of each request, all requests in the same steps."""
    steps = workload.recipe.max_tokens - 1
    spans = [(len(prompt), len(prompt) + steps) for prompt in workload.prompts]
    states = 2 * steps * len(spans) * model.state_bytes  # read and written
    nbytes = steps * model.bytes_per_step + model.kv_bytes(spans) + states
    return Phase(model.operations(spans, steps * len(spans)), nbytes)


# Long enough to cost a thousandth of the time, short enough to sample within a step of a large model.
_SAMPLE_SECONDS = 0.02
_STATUS = Path("/proc/self/status")


def private_bytes() -> int | None:
    """Current anonymous memory (RssAnon); None without /proc."""
    if not _STATUS.exists():
        return None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Context manager: a thread samples private memory."""

    def __init__(self) -> None:
        self._peak = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peak memory")

    def take(self) -> int | None:
        """The peak since the last `take`, in bytes; None: unknown."""
        now = private_bytes()
        peak, self._peak = self._peak, 0
        return None if now is None else max(peak, now)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, private_bytes() or 0)
