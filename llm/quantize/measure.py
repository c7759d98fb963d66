"""How a quantized model differs from the unquantized one: numbers only.

Owns the measures: noise of layer outputs, perplexity, agreement, speed. `report.py` presents them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, stdev
from time import perf_counter
from typing import TYPE_CHECKING

from llm.engine.engine import Engine
from llm.errors import ValidationError
from llm.inputs import PromptType, TokensPrompt
from llm.quantization.quantizer import decibels
from llm.sampling_params import SamplingParams
from llm.setup.calibrate import run_texts

if TYPE_CHECKING:
    from llm.llm import LLM

GREEDY_TOKENS = 64
_SPEED_PREFILL, _SPEED_DECODE, _SPEED_REPEATS = 256, 16, 3
_CAPTURED_BYTES = 256 << 20
# Tokens of a run, and runs, of an interval.
_RUN, _LEAST_RUNS = 32, 8


@dataclass(frozen=True)
class TextScores:
    """A model's scores on texts.

    Attributes:
        perplexity: exp of the mean negative logprob of every token but the first of each text.
        tokens: number of scored tokens.
        likeliest: the likeliest token at each scored position.
        losses: the negative logprob at each scored position.
    """

    perplexity: float
    tokens: int
    likeliest: tuple[int, ...]
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one request, in prefill and decode."""

    prefill: float
    decode: float


def score_texts(llm: LLM, texts: Sequence[str]) -> TextScores:
    """Score each text by itself; a text longer than the model's context is scored in windows."""
    limit = llm.config.model_config.max_model_len - 1
    encoded = llm._preprocessor.token_ids(texts, "texts")
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    windows = [ids for ids in windows if len(ids) > 1]
    if not windows:
        raise ValidationError("the texts have no token to score.", parameter="texts", value=len(texts))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    losses: list[float] = []
    likeliest = []
    for ids, output in zip(windows, outputs, strict=True):
        positions = [position for position in output.prompt_logprobs or () if position]
        for token, position in zip(ids[1:], positions, strict=True):
            losses.append(-position[token].logprob)
            likeliest.append(min(position, key=lambda item, at=position: at[item].rank))  # type: ignore[misc]
    return TextScores(math.exp(sum(losses) / len(losses)), len(losses), tuple(likeliest), tuple(losses))


def perplexity_interval(scores: TextScores) -> tuple[float, float] | None:
    """95%, for other texts like these; None with too few tokens to tell."""
    return _interval(scores.losses)


def change_interval(before: TextScores, after: TextScores) -> tuple[float, float] | None:
    """95%, of after / before; of the same tokens, so that it is far narrower than the two perplexities' intervals."""
    return _interval([b - a for a, b in zip(before.losses, after.losses, strict=True)])


def _interval(losses: Sequence[float]) -> tuple[float, float] | None:
    """exp(mean -+ 1.96 standard errors). Neighbouring tokens are alike, so means of runs of tokens are compared."""
    runs = [losses[start : start + _RUN] for start in range(0, len(losses) - _RUN + 1, _RUN)]
    if len(runs) < _LEAST_RUNS:
        return None
    error = stdev(sum(run) / _RUN for run in runs) / math.sqrt(len(runs))
    centre = sum(losses) / len(losses)
    return math.exp(centre - 1.96 * error), math.exp(centre + 1.96 * error)


def agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """The share of positions at which both sequences are equal."""
    return sum(map(int.__eq__, first, second)) / max(1, len(first))


def greedy_tokens(llm: LLM, prompts: Sequence[PromptType]) -> list[list[int]]:
    """64 greedy tokens after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> float:
    """The share of tokens before the first difference."""
    pairs = zip(first, second, strict=False)
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return same / max(1, max(len(first), len(second)))


def prompts_from(llm: LLM, texts: Sequence[str], count: int = 64, length: int = 24) -> list[TokensPrompt]:
    """`count` prompts of `length` tokens (fewer if the context is shorter), evenly spaced over the texts."""
    length = min(length, llm.config.model_config.max_model_len - 1)
    ids = [token for encoded in llm._preprocessor.token_ids(texts, "texts") for token in encoded]
    step = max(1, (len(ids) - length) // count)
    starts = range(0, max(1, min(len(ids) - length, step * count)), step)
    return [{"prompt_token_ids": ids[start : start + length]} for start in starts]


def measure_speed(llm: LLM) -> Speed:
    """Medians on this machine, of the prompts and of every decode step of three runs."""
    config = llm.config.model_config
    length = min(_SPEED_PREFILL, config.max_model_len - _SPEED_DECODE - 1)
    prefills, steps = [], []
    for repeat in range(_SPEED_REPEATS + 1):  # the first is a warm-up
        ids = [(7 + repeat * 131 + 17 * index) % config.vocab_size for index in range(length)]
        prefill, decode = _seconds(llm, ids)
        if repeat:
            prefills.append(prefill)
            steps += decode
    return Speed(length / median(prefills), 1 / median(steps))


def _seconds(llm: LLM, ids: list[int]) -> tuple[float, list[float]]:
    """(seconds until the first token, of each step that adds one more) of one request."""
    params = SamplingParams(temperature=0, max_tokens=1 + _SPEED_DECODE, ignore_eos=True, detokenize=False)
    engine, times = llm._open_engine(), [0.0]
    engine.runner.set_drafting(False)  # a step adds one token
    try:
        state = engine.add(llm._preprocessor.rows({"prompt_token_ids": ids}, params, SamplingParams)[0])
        request = state.completions[0].request
        while not state.finished:
            known, started = len(request.token_ids), perf_counter()
            engine.step()
            times[-1] += perf_counter() - started
            if len(request.token_ids) > known:
                times.append(0.0)
        engine.end_call()
    finally:
        engine.runner.set_drafting(True)
    return times[0], times[1:-1]


def output_noise(plain: Engine, quantized: Engine, texts: Sequence[str]) -> dict[str, float]:
    """Signal-to-noise ratio, in dB, of each quantized layer's outputs on `texts`.

    A layer gets the inputs of the same layer of `plain`, so errors of earlier layers do not add up. The inputs and
    outputs of one step are kept for the comparison; if those of all layers take too much memory, the texts are run
    several times.
    """
    sums: dict[str, list[float]] = {}
    left = [layer.name for layer in quantized.runner.layer_reports() if layer.kind != "embedding" and layer.scheme]

    def compare() -> None:
        for name, pair in quantized.runner.layer_noise(plain.runner.take_captured()).items():
            signal, noise = sums.get(name, (0.0, 0.0))
            sums[name] = [signal + pair[0], noise + pair[1]]

    while left:
        captured = plain.runner.start_capturing(left, _CAPTURED_BYTES)
        try:
            run_texts(plain, texts, "texts", compare)
        finally:
            plain.runner.stop_capturing()
        left = left[len(captured) :]
    return {name: decibels(signal, noise) for name, (signal, noise) in sums.items()}
