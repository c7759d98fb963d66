"""`LLM.quantization_report()`: the effect of quantization, measured, as a table, a DataFrame, and bars in a notebook.

The measures are noise of layer outputs, perplexity, agreement and speed.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, stdev
from time import perf_counter
from typing import TYPE_CHECKING

from llm.base.library_settings import library_defaults
from llm.base.types import JsonObject
from llm.engine.boundary import LayerReport, measured_weights
from llm.engine.engine import Engine
from llm.errors import LLMError, ValidationError
from llm.inputs import PromptType, TokensPrompt
from llm.output_formats import aligned
from llm.quantization.quantizer import decibels, far_layers
from llm.sampling_params import SamplingParams
from llm.setup.calibrate import run_texts

if TYPE_CHECKING:
    import pandas

    from llm.engine.engine import Engine
    from llm.inputs import PromptType
    from llm.llm import LLM


_BAR_WIDTH, _ROW_HEIGHT, _LABEL_WIDTH = 260, 16, 300
_PROMPTS, _PROMPT_TOKENS = 64, 24


@dataclass(frozen=True)
class QuantizationReport:
    """The effect of quantization on a model.

    Attributes:
        name: the quantization's name; of `requantize` that one.
        baseline: what it is compared with: "unquantized", or the format of a checkpoint that was quantized already.
        layers: one entry per layer with a weight.
        perplexity_before, perplexity_after: on the texts; None without texts or without an unquantized model.
        perplexity_interval: 95% of perplexity_after, for other texts like these; None: too few tokens, fewer than 256.
        change_interval: 95% of perplexity_after / perplexity_before, on the same tokens.
        tokens_scored: number of scored tokens of the texts.
        next_token_agreement: share of the texts' positions where both models have the same likeliest token.
        greedy_agreement: share of 64 greedy tokens before the first difference, averaged over the prompts.
        identical_prompts: number of prompts, of `prompts`, whose 64 tokens are all equal.
        speed_before, speed_after: tokens per second on this machine.
    """

    name: str
    layers: tuple[LayerReport, ...]
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    tokens_scored: int = 0
    next_token_agreement: float | None = None
    greedy_agreement: float | None = None
    identical_prompts: int = 0
    prompts: int = 0
    speed_before: Speed | None = None
    speed_after: Speed | None = None
    perplexity_interval: tuple[float, float] | None = None
    change_interval: tuple[float, float] | None = None
    notes: tuple[str, ...] = field(default=())
    baseline: str = "unquantized"

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def perplexity_change(self) -> float | None:
        """after / before - 1."""
        if self.perplexity_before is None or self.perplexity_after is None:
            return None
        return self.perplexity_after / self.perplexity_before - 1

    def summary(self) -> list[str]:
        """The totals, one per line."""
        beside = "" if self.baseline == "unquantized" else f" of {self.baseline}"
        lines = [
            f"quantization {self.name}{beside}: {_bytes(self.bytes_before)} -> {_bytes(self.bytes_after)} of weights"
        ]
        if self.perplexity_after is not None:
            before = "" if self.perplexity_before is None else f"{self.perplexity_before:.4f} -> "
            change = "" if self.perplexity_change is None else f" ({self.perplexity_change:+.3%})"
            lines.append(f"perplexity {before}{self.perplexity_after:.4f}{change} on {self.tokens_scored:,} tokens")
            lines += self._interval_lines()
        if self.next_token_agreement is not None:
            lines.append(f"same likeliest next token: {self.next_token_agreement:.2%} of positions")
        if self.greedy_agreement is not None:
            lines.append(
                f"greedy: {self.greedy_agreement:.1%} of 64 tokens before the first difference, "
                f"{self.identical_prompts} of {self.prompts} prompts identical"
            )
        far = far_layers(measured_weights(self.layers))
        return [*lines, *self._speed_lines(), *far, *self.notes]

    def _interval_lines(self) -> list[str]:
        if self.perplexity_interval is None:
            return ["  95% intervals: not known, the texts have too few tokens"]
        low, high = self.perplexity_interval
        lines = [f"  95% interval on other texts like these: {low:.4f} to {high:.4f}"]
        if self.change_interval is not None:
            low, high = (each - 1 for each in self.change_interval)
            lines.append(f"  95% interval of the change: {low:+.3%} to {high:+.3%}")
        return lines

    def _speed_lines(self) -> list[str]:
        if self.speed_before is None or self.speed_after is None:
            return []
        lines = []
        for what in ("prefill", "decode"):
            before, after = getattr(self.speed_before, what), getattr(self.speed_after, what)
            slower = "" if after >= before else f": SLOWER than {self.baseline} on this machine"
            lines.append(f"{what} {before:,.0f} -> {after:,.0f} tokens/s ({after / before:.2f}x){slower}")
        return lines

    def __str__(self) -> str:
        header = ("layer", "scheme", "bytes", "weights dB", "outputs dB")
        rows = [
            (
                layer.name,
                layer.scheme or "-",
                f"{_bytes(layer.bytes_before)} -> {_bytes(layer.bytes_after)}",
                _decibels(layer.weight_snr),
                _decibels(layer.output_snr),
            )
            for layer in self.layers
        ]
        return "\n".join([*self.summary(), "", *aligned([header, *rows])])

    __repr__ = __str__

    def to_dataframe(self) -> pandas.DataFrame:
        """A pandas DataFrame, one row per layer."""
        try:
            import pandas
        except ImportError as error:
            raise LLMError("to_dataframe() needs pandas; pip install pandas.") from error
        return pandas.DataFrame([asdict(layer) for layer in self.layers])

    def _repr_html_(self) -> str:
        summary = "".join(f"<div>{html.escape(line)}</div>" for line in self.summary())
        return f"<div>{summary}{self.bars()}</div>"

    def bars(self) -> str:
        """An SVG bar plot of each quantized layer's signal-to-noise ratio: weights (light) and outputs (dark)."""
        layers = [layer for layer in self.layers if layer.scheme]
        values = [value for layer in layers for value in (layer.weight_snr, layer.output_snr) if value is not None]
        finite = [value for value in values if value != float("inf")]
        largest = max(finite, default=1.0)
        parts = []
        for index, layer in enumerate(layers):
            top = index * _ROW_HEIGHT * 2
            label = html.escape(f"{layer.name} ({layer.scheme})")
            parts.append(f'<text x="0" y="{top + _ROW_HEIGHT + 4}" font-size="11">{label}</text>')
            for row, (value, colour) in enumerate(((layer.weight_snr, "#9ecae1"), (layer.output_snr, "#3182bd"))):
                if value is not None:
                    parts.append(_bar(top + 2 + row * (_ROW_HEIGHT - 2), min(value, largest) / largest, colour, value))
        width, height = _LABEL_WIDTH + _BAR_WIDTH + 60, 2 * _ROW_HEIGHT * len(layers)
        size = f'width="{width}" height="{height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" fill="currentColor" {size}>{"".join(parts)}</svg>'


@library_defaults()
def make_report(
    llm: LLM,
    engine: Engine,
    open_plain: Callable[[], LLM] | None,
    texts: Sequence[str],
    prompts: Sequence[PromptType] | None,
    speed: bool,
) -> QuantizationReport:
    """Measure `llm`, the quantized `LLM`, and its `engine`.

    Args:
        open_plain: opens the unquantized `LLM`; None: there is none to compare with.
        texts: texts to score; may be empty.
        prompts: prompts for greedy agreement; None: 64 pieces of the texts.
        speed: True to measure speed.
    """
    result: JsonObject = {"name": _checked_name(llm, texts)}
    if prompts is None:
        prompts = prompts_from(llm, texts) if texts else []
    after = score_texts(llm, texts) if texts else None
    tokens = greedy_tokens(llm, prompts) if prompts else []
    if after is not None:
        result |= {"perplexity_after": after.perplexity, "tokens_scored": after.tokens}
        result["perplexity_interval"] = perplexity_interval(after)
    if speed:
        result["speed_after"] = measure_speed(llm)
    if open_plain is None:
        note = "the unquantized model is not at hand: pass against='its folder' to compare with it"
        return QuantizationReport(layers=tuple(engine.runner.layer_reports()), notes=(note,), **result)
    noise: dict[str, float] = {}
    with open_plain() as plain:
        result["baseline"] = plain.config.model_config.quantization or "unquantized"
        sizes = {layer.name: layer.bytes_after for layer in plain._open_engine().runner.layer_reports()}
        if after is not None:
            before = score_texts(plain, texts)
            result["perplexity_before"] = before.perplexity
            result["change_interval"] = change_interval(before, after)
            result["next_token_agreement"] = agreement(before.likeliest, after.likeliest)
            noise = output_noise(plain._open_engine(), engine, texts)
        if prompts:
            shares = [common_prefix(*pair) for pair in zip(greedy_tokens(plain, prompts), tokens, strict=True)]
            result["greedy_agreement"] = sum(shares) / len(shares)
            result |= {"identical_prompts": sum(share == 1 for share in shares), "prompts": len(shares)}
        if speed:
            result["speed_before"] = measure_speed(plain)
    layers = [
        replace(layer, output_snr=noise.get(layer.name), bytes_before=sizes.get(layer.name, layer.bytes_before))
        for layer in engine.runner.layer_reports()
    ]
    return QuantizationReport(layers=tuple(layers), **result)


def _checked_name(llm: LLM, texts: Sequence[str]) -> str:
    """The quantization's name. `ValidationError` if there is none, or if `texts` is a single text."""
    name = llm.config.model_config.quantization
    if name is None:
        raise ValidationError(
            "the model is not quantized; open it with quantization='w8a8' or another.", parameter="quantization"
        )
    if isinstance(texts, str):
        raise ValidationError("texts is one text, pass a list of texts.", parameter="texts", value=texts)
    asked = llm._args.requantize
    if asked is None:
        return name
    return asked if isinstance(asked, str) else str(asked.get("scheme", "mixed"))


def _bar(top: int, share: float, colour: str, value: float) -> str:
    width = max(1, round(share * _BAR_WIDTH))
    rectangle = f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{width}" height="{_ROW_HEIGHT - 4}" fill="{colour}"/>'
    return f'{rectangle}<text x="{_LABEL_WIDTH + width + 4}" y="{top + 10}" font-size="9">{value:.1f} dB</text>'


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# --- Of texts. ---

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


def windows_of(llm: LLM, texts: Sequence[str], purpose: str) -> list[list[int]]:
    """The token ids of each text, in windows that the model's context has room for; `purpose`: of the tokens.

    Raises:
        ValidationError: there is no window of two tokens.
    """
    limit = llm.config.model_config.max_model_len - 1
    encoded = llm._preprocessor.token_ids(texts, "texts")
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    windows = [ids for ids in windows if len(ids) > 1]
    if not windows:
        raise ValidationError(f"the texts have no token to {purpose}.", parameter="texts", value=len(texts))
    return windows


def score_texts(llm: LLM, texts: Sequence[str]) -> TextScores:
    """Score each text by itself; a text longer than the model's context is scored in windows."""
    windows = windows_of(llm, texts, "score")
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


def prompts_from(llm: LLM, texts: Sequence[str]) -> list[TokensPrompt]:
    """Prompts of 24 tokens (fewer if the context is shorter), evenly spaced over the texts."""
    length = min(_PROMPT_TOKENS, llm.config.model_config.max_model_len - 1)
    ids = [token for encoded in llm._preprocessor.token_ids(texts, "texts") for token in encoded]
    step = max(1, (len(ids) - length) // _PROMPTS)
    starts = range(0, max(1, min(len(ids) - length, step * _PROMPTS)), step)
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
