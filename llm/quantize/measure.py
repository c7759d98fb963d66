"""How a quantized model differs from the one it was made of: numbers only, no presentation.

Owns the measures: noise of weights and of outputs, perplexity, agreement, bytes, speed. What they look like is
`quantize_report.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from llm.base.errors import ValidationError
from llm.engine.calibrate import run_texts
from llm.engine.engine import Engine
from llm.quantization.quantizer import decibels
from llm.sampling_params import SamplingParams

GREEDY_TOKENS = 64
_SPEED_PREFILL, _SPEED_DECODE, _SPEED_REPEATS = 256, 16, 3
_CAPTURED_BYTES = 256 << 20


@dataclass(frozen=True)
class TextScores:
    """On texts.

    Attributes:
        perplexity: exp of the mean negative logprob of every token but the first of each text.
        tokens: how many were scored.
        likeliest: the likeliest token at each of these positions.
    """

    perplexity: float
    tokens: int
    likeliest: tuple[int, ...]


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one row: reading a prompt, and writing."""

    prefill: float
    decode: float


def score_texts(llm: Any, texts: Sequence[str]) -> TextScores:
    """Perplexity of each text by itself; one longer than the model's window is scored in windows."""
    limit = llm.config.model_config.max_model_len - 1
    encoded = llm._preprocessor.token_ids(texts, "texts")
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    windows = [ids for ids in windows if len(ids) > 1]
    if not windows:
        raise ValidationError("the texts have no token to score.", parameter="texts", value=len(texts))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    total, likeliest = 0.0, []
    for ids, output in zip(windows, outputs, strict=True):
        for token, position in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            total -= position[token].logprob
            likeliest.append(min(position, key=lambda item, at=position: at[item].rank))  # type: ignore[misc]
    return TextScores(math.exp(total / len(likeliest)), len(likeliest), tuple(likeliest))


def agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """The share of positions at which both are equal."""
    return sum(map(int.__eq__, first, second)) / max(1, len(first))


def greedy_tokens(llm: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """64 greedy tokens after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> float:
    """The share of tokens before the first difference."""
    pairs = zip(first, second, strict=False)
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return same / max(1, max(len(first), len(second)))


def prompts_from(llm: Any, texts: Sequence[str], count: int = 64, length: int = 24) -> list[dict[str, Any]]:
    """`count` prompts of `length` tokens (fewer where the model takes no more) out of the texts, at even distances."""
    length = min(length, llm.config.model_config.max_model_len - 1)
    ids = [token for encoded in llm._preprocessor.token_ids(texts, "texts") for token in encoded]
    step = max(1, (len(ids) - length) // count)
    starts = range(0, max(1, min(len(ids) - length, step * count)), step)
    return [{"prompt_token_ids": ids[start : start + length]} for start in starts]


def measure_speed(llm: Any) -> Speed:
    """The best of three runs; the numbers are of this machine, now."""
    longest = llm.config.model_config.max_model_len
    length = min(_SPEED_PREFILL, longest - _SPEED_DECODE - 1)
    vocab = llm.config.model_config.vocab_size
    prefill = decode = math.inf
    for repeat in range(_SPEED_REPEATS + 1):  # the first is a warm-up
        ids = [(7 + repeat * 131 + 17 * index) % vocab for index in range(length)]
        once = _seconds(llm, ids, 1)
        whole = _seconds(llm, [(token + 1) % vocab for token in ids], 1 + _SPEED_DECODE)
        if repeat:
            prefill, decode = min(prefill, once), min(decode, max(whole - once, 1e-9))
    return Speed(length / prefill, _SPEED_DECODE / decode)


def _seconds(llm: Any, ids: list[int], max_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started = perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return perf_counter() - started


def output_noise(plain: Engine, quantized: Engine, texts: Sequence[str]) -> dict[str, float]:
    """Decibels of each quantized layer's outputs, given what the layer of `plain` was given on `texts`.

    So errors of earlier layers do not add up. A step's inputs and outputs are held while it is compared; where those of
    all layers are too much, the texts are run several times.
    """
    sums: dict[str, list[float]] = {}
    left = [layer.name for layer in quantized.runner.layer_reports() if layer.kind == "linear" and layer.scheme]

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
