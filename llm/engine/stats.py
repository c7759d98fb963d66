"""What an engine has done since it was built: `LLM.stats()`, `LLM.get_metrics()` under vLLM's names, and the warning
that other programs had its cores.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TypedDict

from llm.base.system import involuntary_switches
from llm.engine.block_manager import BlockManager
from llm.engine.request import Request
from llm.outputs import Counter, Gauge, Histogram, Metric

logger = logging.getLogger("llm")

GIB = 1 << 30


@dataclass
class EngineStats:
    """Counts since the engine was built.

    Attributes:
        tokens: computed ones, of prompts and answers; drafts and what is computed again included.
        drafted_tokens, accepted_tokens: drafts that were verified, and how many of them were accepted.
        seconds: time in `step`, of which `model_seconds` in forward, LM head and sampler.
    """

    steps: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0

    def add(self, step: EngineStats) -> None:
        """Count a step, or several."""
        self.steps += step.steps
        self.tokens += step.tokens
        self.generated_tokens += step.generated_tokens
        self.drafted_tokens += step.drafted_tokens
        self.accepted_tokens += step.accepted_tokens
        self.seconds += step.seconds
        self.model_seconds += step.model_seconds


@dataclass(frozen=True)
class Gauges:
    """What there is now, as in `LLMStats`."""

    running: int
    waiting: int
    kv_cache_used: float


@dataclass
class LLMStats(EngineStats):
    """`EngineStats`, and the requests and the memory. A completion is a request.

    Attributes:
        running, waiting: requests now.
        ended: how many requests have ended, by `finish_reason`.
        prompt_tokens: of the requests that have ended, of which `cached_tokens` came from the prefix cache.
        preemptions: how often a request that has ended lost its blocks and was computed again.
        weight_bytes: of the loaded weights, in memory or in a file.
        kv_cache_bytes: reserved; memory is touched when it is used.
        kv_cache_used: share of its blocks that requests hold now; of its slots for states, if every layer is recurrent.
    """

    running: int = 0
    waiting: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    weight_bytes: int = 0
    kv_cache_bytes: int = 0
    kv_cache_used: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{item.name:<18} {_shown(item.name, getattr(self, item.name))}" for item in fields(self))


def _shown(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {reason}" for reason, count in value.items()) or "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / GIB:.3f} GiB"
    if name == "kv_cache_used":
        return f"{value:.0%}"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


# --- Totals of ended requests. ---

_REASONS = ("stop", "length", "abort", "error", "repetition")
_COUNTS = (
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class TotalsOfEnded(TypedDict):
    ended: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    preemptions: int


def share_in_use(blocks: BlockManager) -> float:
    """Share that requests hold of the fullest group's blocks; of the slots where there are no groups."""
    pool = min(blocks.pools, key=lambda pool: len(pool.free), default=blocks.slots)
    return 0.0 if pool is None else 1.0 - len(pool.free) / (pool.num_blocks - 1)


@dataclass
class _Values:
    """Values counted between bounds; `counts` has one entry more than `bounds`."""

    bounds: tuple[float, ...]
    total: float = 0.0
    counts: Counts[int] = field(default_factory=Counts)

    def add(self, value: float) -> None:
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def snapshot(self, name: str, labels: dict[str, str]) -> Histogram:
        buckets, count = {}, 0
        for index, bound in enumerate((*map(str, self.bounds), "+Inf")):
            count += self.counts[index]
            buckets[bound] = count
        return Histogram(name, dict(labels), count, self.total, buckets)


class EndedRequests:
    """Counts of the requests that have ended since the engine was built, aborted ones included."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._reasons: Counts[str] = Counts()
        self._values = {
            "request_prompt_tokens": _Values(_TOKENS),
            "request_generation_tokens": _Values(_TOKENS),
            "time_to_first_token_seconds": _Values(_FIRST_TOKEN),
            "e2e_request_latency_seconds": _Values(_WHOLE),
        }

    def add(self, request: Request) -> None:
        times = request.metrics
        self._reasons[request.finish_reason or "abort"] += 1
        counts = self._counts
        counts["prompt_tokens"] += request.num_prompt_tokens
        counts["generation_tokens"] += request.num_output_tokens
        counts["num_preemptions"] += request.num_preemptions
        counts["spec_decode_num_draft_tokens"] += request.num_drafted_tokens
        counts["spec_decode_num_accepted_tokens"] += request.num_accepted_tokens
        if request.num_cached_tokens is not None and not request.params.skip_reading_prefix_cache:
            counts["prefix_cache_queries"] += request.num_prompt_tokens
            counts["prefix_cache_hits"] += request.num_cached_tokens
        self._values["request_prompt_tokens"].add(request.num_prompt_tokens)
        self._values["request_generation_tokens"].add(request.num_output_tokens)
        if times.first_token_ts:
            self._values["time_to_first_token_seconds"].add(times.first_token_latency)
            self._values["e2e_request_latency_seconds"].add(times.last_token_ts - times.queued_ts)

    def totals(self) -> TotalsOfEnded:
        """The counts under the names of `LLMStats`."""
        counts = self._counts
        return {
            "ended": dict(self._reasons),
            "prompt_tokens": counts["prompt_tokens"],
            "cached_tokens": counts["prefix_cache_hits"],
            "preemptions": counts["num_preemptions"],
        }

    def snapshot(self, now: Gauges, model: str) -> list[Metric]:
        """Everything, as it is now."""
        labels = {"engine": "0", "model_name": model}
        gauges = {
            "num_requests_running": float(now.running),
            "num_requests_waiting": float(now.waiting),
            "kv_cache_usage_perc": now.kv_cache_used,
        }
        found: list[Metric] = [Gauge(f"vllm:{name}", dict(labels), value) for name, value in gauges.items()]
        found += [Counter(f"vllm:{name}", dict(labels), value) for name, value in self._counts.items()]
        for reason in _REASONS:
            own = labels | {"finished_reason": reason}
            found.append(Counter("vllm:request_success", own, self._reasons[reason]))
        return [*found, *(values.snapshot(f"vllm:{name}", labels) for name, values in self._values.items())]


# --- Busy cores. ---

_LEAST_SECONDS = 2.0  # shorter calls are not judged
_FOUGHT_SHARE = 0.25  # at least this fraction of the call's time off the core ...
_FOUGHT_RATE = 5.0  # ... and this many involuntary switches per second; a thread that sleeps switches voluntarily
_has_warned = False


@contextmanager
def warn_of_busy_cores(threads: int) -> Iterator[None]:
    """Warn, once per process, if other programs ran on the cores of `threads` threads inside the context.

    No warning for one thread: it waits for no other thread, and there are no fewer threads to advise.
    """
    if involuntary_switches() is None or threads == 1:
        yield
        return
    before = _taken_away(), time.thread_time(), time.perf_counter()
    yield
    seconds = time.perf_counter() - before[2]
    lost = seconds - (time.thread_time() - before[1])
    if has_fought(seconds, lost, _taken_away() - before[0]):
        _warn(lost / seconds, threads)


def has_fought(seconds: float, lost: float, taken_away: int) -> bool:
    """True if other programs ran on the cores of a call.

    Args:
        seconds: duration of the call.
        lost: seconds in which its thread did not run.
        taken_away: involuntary context switches of the thread.
    """
    return seconds >= _LEAST_SECONDS and lost >= _FOUGHT_SHARE * seconds and taken_away >= _FOUGHT_RATE * seconds


def _taken_away() -> int:
    return involuntary_switches() or 0


def _warn(share: float, threads: int) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "other programs ran on this call's cores for %d%% of its time; it is faster without them, or with fewer "
            "threads than %d: LLM(num_threads=...).",
            round(100 * share),
            threads,
        )
