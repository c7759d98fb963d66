"""`python -m llm bench --sampler`: the time of one sampler step on random logits.

Each figure is compared with one pass over the same logits, the time to read them once and take their maximum, which no
sampler can beat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llm.base.types import JsonObject
from llm.config.engine import SchedulerConfig
from llm.kernels.select import backend_for
from llm.platforms import select_platform
from llm.sampling.logits_processors.interface import AdapterLogitsProcessor, BatchUpdate, RequestLogitsProcessor
from llm.sampling.logits_processors.pipeline import LogitsProcessors
from llm.sampling.sampler import Sampler, SamplingRows
from llm.sampling_params import SamplingParams

ROWS = (1, 32, 256)
VOCABULARIES = (32_000, 152_064)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
CASES: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, a custom processor loaded that no row uses": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p 0.1": SamplingParams(temperature=0.8, min_p=0.1),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    "5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "a custom processor on every row": SamplingParams(temperature=0.0, extra_args={"bias": 1.0}),
}


class BiasFirstToken(AdapterLogitsProcessor):
    """The custom processor: adds `extra_args["bias"]` to the first logit."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        bias = (params.extra_args or {}).get("bias")
        if bias is None:
            return None

        def add(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[0] += bias
            return logits

        return add


@dataclass(frozen=True)
class SamplerFigure:
    """Median seconds of one step; `passes`: their ratio to one pass over the logits."""

    case: str
    rows: int
    vocab: int
    seconds: float
    pass_seconds: float

    @property
    def passes(self) -> float:
        return self.seconds / self.pass_seconds


def run_sampler_bench(
    reps: int,
    rows: Sequence[int] = ROWS,
    vocabularies: Sequence[int] = VOCABULARIES,
    report: Callable[[SamplerFigure], None] = lambda figure: None,
) -> list[SamplerFigure]:
    """Measure every case at every size; `report` is called with each figure."""
    figures = []
    for vocab in vocabularies:
        for count in rows:
            logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(count)).mul_(3)
            # A step of one row takes microseconds: repeat it more often.
            repeats = max(reps, reps * 32 // count)
            one_pass = _one_pass(logits, repeats)
            for case in CASES:
                figure = SamplerFigure(case, count, vocab, _measure(case, logits, repeats), one_pass)
                figures.append(figure)
                report(figure)
    return figures


def as_object(figures: Sequence[SamplerFigure]) -> JsonObject:
    """The object that `--json` prints."""
    return {
        "threads": torch.get_num_threads(),
        "sampler": [{**asdict(figure), "passes": figure.passes} for figure in figures],
    }


def as_line(figure: SamplerFigure) -> str:
    return (
        f"{figure.rows:>4} rows x {figure.vocab:>6}  {1e3 * figure.seconds:>9.3f} ms  "
        f"{figure.passes:>6.2f} passes of {1e3 * figure.pass_seconds:.3f} ms  {figure.case}"
    )


def _one_pass(logits: torch.Tensor, repeats: int) -> float:
    return _median(lambda: logits.amax(dim=-1), lambda: None, repeats)


def _measure(case: str, logits: torch.Tensor, repeats: int) -> float:
    """Seconds of a step, called as the runner does: each step asks whether all processors are idle."""
    count, vocab = logits.shape
    config: Any = SimpleNamespace(
        scheduler_config=SchedulerConfig(max_num_seqs=count, max_num_batched_tokens=512, enable_chunked_prefill=True),
        model_config=SimpleNamespace(max_model_len=4096, vocab_size=vocab),
    )
    custom = [BiasFirstToken] if "custom" in case else []
    backend = backend_for(select_platform("cpu")[0])
    processors = LogitsProcessors(config, torch.device("cpu"), custom, backend)
    sampling = SamplingRows(count)
    params = replace(CASES[case], seed=1, max_tokens=4096)
    tokens = np.random.Generator(np.random.Philox(count)).integers(0, vocab, (count, PROMPT_TOKENS + OUTPUT_TOKENS))
    added = []
    for row in range(count):
        sampling.set(row, params, row, 0)
        ids = tokens[row].tolist()
        added.append((row, params, ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]))
    processors.update_state(BatchUpdate(count, [], added, []))
    sampler, work = Sampler(backend=backend), torch.empty_like(logits)
    rows, outputs = np.arange(count), np.full(count, OUTPUT_TOKENS)

    @torch.inference_mode()
    def step() -> None:
        processors.update_state(None)
        sampler(work, sampling, rows, outputs, None if processors.is_idle() else processors, count)

    return _median(step, lambda: work.copy_(logits), repeats)


def _median(action: Callable[[], object], prepare: Callable[[], object], repeats: int) -> float:
    """Median seconds of `action`. `prepare` runs before each and is not timed; the first run is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        prepare()
        started = perf_counter()
        action()
        seconds.append(perf_counter() - started)
    return median(seconds[1:])
