"""How a quantized model differs from the one it was made of: numbers only, no presentation.

Owns the measures: noise of weights and of outputs, perplexity, agreement, bytes, speed. What they look like is
`quantize_report.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from llm.base.errors import ValidationError
from llm.engine.calibrate import is_linear, run_texts
from llm.quantization.quantizer import decibels
from llm.sampling_params import SamplingParams

GREEDY_TOKENS = 64
_SPEED_PREFILL, _SPEED_DECODE, _SPEED_REPEATS = 256, 16, 3


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        scheme: "" when it is not quantized.
        bytes_before, bytes_after: of its weight, scales included.
        weight_snr: decibels of the weight against its error; None: the original is not known.
        output_snr: the same of its outputs on the texts, when it is given what the unquantized layer was given.
    """

    name: str
    scheme: str
    bytes_before: int
    bytes_after: int
    weight_snr: float | None = None
    output_snr: float | None = None


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


def layer_reports(model: Any, weight_dtype: torch.dtype) -> list[LayerReport]:
    """Every layer with a weight, in the model's order; `weight_dtype` is the unquantized weights'."""
    reports = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or getattr(module, "quant_kind", "") not in ("linear", "embedding"):
            continue
        after = stored_bytes(module)
        packed = getattr(module, "packed_weight", None) if method.scheme else None
        before = packed.n * packed.k * weight_dtype.itemsize if packed is not None else after
        snr = getattr(getattr(method, "storage", None), "signal_to_noise", None)
        reports.append(LayerReport(name, method.scheme, before, after, snr))
    return reports


def stored_bytes(module: Any) -> int:
    """What the layer's weight takes in memory, its bias aside."""
    tensors = [*module.buffers(recurse=False), *module.parameters(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not getattr(module, "bias", None))


def output_noise(plain: Any, quantized: Any, texts: Sequence[str]) -> dict[str, float]:
    """Decibels of each quantized layer's outputs, given what the layer of `plain` was given on `texts`.

    `plain` and `quantized` are engines; so errors of earlier layers do not add up.
    """
    sums: dict[str, list[float]] = {}
    others = dict(quantized.runner.model.named_modules())
    with _comparing(plain.runner.model, others, sums):
        run_texts(plain, texts, "texts")
    return {name: decibels(signal, noise) for name, (signal, noise) in sums.items()}


@contextmanager
def _comparing(model: Any, others: dict[str, Any], sums: dict[str, list[float]]) -> Iterator[None]:
    def hook(name: str) -> Any:
        def compare(module: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            error = others[name](inputs[0]) - output
            held = sums.setdefault(name, [0.0, 0.0])
            held[0] += float(output.double().square().sum())
            held[1] += float(error.double().square().sum())

        return compare

    layers = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    handles = [module.register_forward_hook(hook(name)) for name, module in layers if others[name].quant_method.scheme]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
