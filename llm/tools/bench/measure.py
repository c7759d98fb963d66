"""Running workloads, by this engine and by `transformers.generate`, and turning times into figures with their floors.

The prefill of a stream is a separate run, with other ids and one new token. The rest of the whole run's time is divided
by the number of decode steps. A batch is measured by its wall time. transformers computes in this process and on the
same weights: bfloat16 weights have the same values on both sides, and both compute in float32 (transformers on a
float32 copy that it makes at load).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from llm.base.optional import quiet
from llm.engine.boundary import Phase, Rates
from llm.engine.stats import EngineStats
from llm.llm import LLM
from llm.runner.inspection import ModelCost
from llm.sampling_params import SamplingParams
from llm.tools.bench.machine import CpuWatch
from llm.tools.bench.workloads import PREFILL_REPS, Workload, make_workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


# --- Memory. ---

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


# --- transformers beside it. ---

_SEED = 1234
# Wide enough that a model with random weights does not repeat one token.
_WEIGHT_STD = 0.04
_BIAS_STD = 0.02


class Transformers:
    """`transformers.generate` as a contestant."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.float().eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @classmethod
    def load(cls, folder: Path) -> Transformers:
        from transformers import AutoModelForCausalLM

        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
        return cls(model)

    @classmethod
    def from_config(cls, folder: Path, weight_dtype: torch.dtype) -> Transformers:
        """Random weights for the config.json in `folder`, written there as a checkpoint of `weight_dtype`."""
        config = (folder / "config.json").read_text(encoding="utf-8")
        with quiet():
            model = _random_model(folder)
            nn.Module.to(model, weight_dtype)  # in place; transformers' own `to` has no usable type
            model.save_pretrained(folder)
        # transformers writes the file with its defaults spelled out; restore the published one.
        (folder / "config.json").write_text(config, encoding="utf-8")
        # Reload: in the saved model the rope frequencies were rounded to `weight_dtype` along with the weights.
        return cls.load(folder)

    @staticmethod
    def describe(quantization: str | None) -> str:
        """A sentence on the comparison; `quantization`: of this engine's weights."""
        weights = "the same weights, computing in float32 as we do"
        if quantization is not None:
            weights = f"the checkpoint's weights, computing in float32 (ours are quantized: {quantization})"
        how = "one static batch padded on the left, scaled-dot-product attention if it has that, greedy"
        return f"transformers.generate in this process, on {weights}: {how}"

    def generate(self, prompts: Tokens, max_tokens: int) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            outputs = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, use_cache=True
            )
        return outputs[:, longest:].tolist()

    def stats(self) -> EngineStats:
        return EngineStats()


@dataclass(frozen=True)
class Agreement:
    """How far the outputs of two engines agree.

    Attributes:
        equal_tokens: share of positions with the same token. Where two tokens are nearly equally likely, rounding
            decides, and the outputs differ from there on.
        equal_rows: number of prompts whose outputs are equal to the end.
        distinct_tokens: number of different tokens in our output; with one or two, agreement means little.
    """

    equal_tokens: float
    equal_rows: int
    rows: int
    distinct_tokens: int


def agreement(ours: Sequence[Tokens], theirs: Sequence[Tokens]) -> Agreement:
    """Compare the outputs of several runs; a position that one output lacks counts as different."""
    pairs = [pair for mine, other in zip(ours, theirs, strict=True) for pair in zip(mine, other, strict=True)]
    positions = sum(max(len(mine), len(other)) for mine, other in pairs)
    equal = sum(a == b for mine, other in pairs for a, b in zip(mine, other, strict=False))
    return Agreement(
        equal / positions,
        sum(mine == other for mine, other in pairs),
        len(pairs),
        len({token for mine, _ in pairs for token in mine}),
    )


def advantage(ours: Figure, theirs: Figure) -> float:
    """The ratio of medians, above 1 where ours is better."""
    ratio = ours.median / theirs.median
    return ratio if ours.higher_is_better else 1 / ratio


def _random_model(folder: Path) -> PreTrainedModel:
    """A float32 model with deterministic random weights; the global random state is restored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.initializer_range = _WEIGHT_STD
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, _BIAS_STD)
    return model
