"""`LLM.verify` and `LLM.selfcheck`: does a loaded model compute what it should."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llm.base.optional import quiet
from llm.engine.engine import Engine
from llm.engine.output import PromptState
from llm.engine.preprocess import Preprocessor
from llm.engine.rows import Row
from llm.errors import OutOfMemoryError, ValidationError
from llm.outputs import RequestOutput
from llm.platforms import select_platform
from llm.sampling_params import SamplingParams
from llm.tools.quantization_report import windows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llm.llm import LLM


# The largest difference of logprobs that adding in another order in float32 explains.
_ROUNDING = 5e-3


@dataclass(frozen=True)
class Difference:
    """Our logprobs beside transformers', at every position of the texts.

    Attributes:
        name: of the settings that ours were computed with.
        largest, mean: of |ours - theirs|, of the text's token and of our likeliest one.
        agreement: share of positions with the same likeliest token.
        margin: the largest logprob by which transformers prefers its likeliest token where ours is another; 0.0: none.
    """

    name: str
    largest: float
    mean: float
    agreement: float
    margin: float


@dataclass(frozen=True)
class Verification:
    """What `LLM.verify` found. `print` shows it.

    Attributes:
        positions: tokens that were compared.
        loaded: the model as it is loaded.
        exact: with float weights and a float32 KV cache; the same as `loaded` if that is so loaded.
        agrees: `exact` differs by no more than rounding in float32 explains.
        explained: the settings that may explain what `loaded` differs by beyond `exact`.
    """

    positions: int
    loaded: Difference
    exact: Difference
    explained: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return self.exact.largest <= _ROUNDING

    def __str__(self) -> str:
        shown = [self.exact] if self.loaded == self.exact else [self.exact, self.loaded]
        width = max(len(each.name) for each in shown)
        lines = [f"{self.positions:,} positions, beside transformers in float32"]
        lines += [
            f"{each.name.ljust(width)}  logprobs differ by at most {each.largest:.2e}, {each.mean:.2e} on average; "
            f"the same likeliest token at {each.agreement:.2%}, elsewhere it is likelier by at most {each.margin:.2e}"
            for each in shown
        ]
        if self.explained:
            lines.append(f"what the second line has more is explained by {', '.join(self.explained)}")
        verdict = "is" if self.agrees else "is NOT"
        return "\n".join([*lines, f"the first line {verdict} explained by rounding in float32 (at most {_ROUNDING})"])

    __repr__ = __str__


@dataclass(frozen=True)
class _Position:
    """Of one text token: its logprob, our likeliest token and its logprob."""

    logprob: float
    likeliest: int
    best: float


def verify(llm: LLM, texts: Sequence[str], folder: Path, open_exact: Callable[[], LLM] | None) -> Verification:
    """Compare `llm` with transformers' model of `folder`.

    Args:
        open_exact: opens the model with float weights and a float32 KV cache; None: `llm` is so loaded.
    """
    windows = _windows(llm, texts)
    loaded = exact = _scored(llm, windows)
    if open_exact is not None:
        with open_exact() as other:
            exact = _scored(other, windows)
    reference = _Reference(folder, llm)
    theirs = [reference.differences(ids, (*pair,)) for ids, *pair in zip(windows, loaded, exact, strict=True)]
    first = _summed("as loaded", [each[0] for each in theirs])
    if open_exact is None:
        return Verification(len(first[1]), first[0], first[0], ())
    second = _summed("float weights and KV cache", [each[1] for each in theirs])
    return Verification(len(first[1]), first[0], second[0], _settings(llm))


def is_exact(llm: LLM) -> bool:
    """True if nothing but the order of additions in float32 keeps its logprobs from transformers'."""
    return not _settings(llm)


def _settings(llm: LLM) -> tuple[str, ...]:
    """What rounds more than transformers' float32 does."""
    config, found = llm.config, []
    if config.model_config.quantization is not None:
        found.append(f"quantization={config.model_config.quantization!r}")
    if llm._args.dtype not in ("auto", "float32", torch.float32):
        found.append(f"dtype={llm._args.dtype}")
    if config.cache_config.kv_cache_dtype is not torch.float32:
        found.append(f"kv_cache_dtype={str(config.cache_config.kv_cache_dtype).removeprefix('torch.')}")
    return tuple(found)


def _windows(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    if isinstance(texts, str):
        raise ValidationError("texts is one text, pass a list of texts.", parameter="texts", value=texts)
    return windows_of(llm, texts, "compare")


def _scored(llm: LLM, windows: Sequence[list[int]]) -> list[list[_Position]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    params.skip_reading_prefix_cache = True
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    found = []
    for ids, output in zip(windows, outputs, strict=True):
        positions = [position for position in output.prompt_logprobs or () if position]
        scored = []
        for token, position in zip(ids[1:], positions, strict=True):
            likeliest = min(position, key=lambda item, at=position: at[item].rank)  # type: ignore[misc]
            scored.append(_Position(position[token].logprob, likeliest, position[likeliest].logprob))
        found.append(scored)
    return found


class _Reference:
    """transformers' model of a folder, in float32."""

    def __init__(self, folder: Path, llm: LLM) -> None:
        from transformers import AutoModelForCausalLM

        needed = 4 * llm._open_engine().runner.cost().parameters
        free = select_platform("cpu")[0].memory_free()
        if needed > free:
            raise OutOfMemoryError(
                f"transformers' model takes {needed} bytes in float32 and {free} are free; verify a smaller model of "
                "the family, or free memory."
            )
        with quiet():
            self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
            ).eval()

    @torch.inference_mode()
    def differences(self, ids: list[int], ours: Sequence[Sequence[_Position]]) -> list[list[tuple[float, float]]]:
        """For each of ours and each position: (|difference| of logprobs, margin of their likeliest token over ours)."""
        logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        theirs = logits.float().log_softmax(dim=-1)
        best = theirs.max(dim=-1).values.tolist()
        found = []
        for positions in ours:
            own = []
            for row, token, position, highest in zip(theirs, ids[1:], positions, best, strict=True):
                at_likeliest = float(row[position.likeliest])
                apart = max(abs(float(row[token]) - position.logprob), abs(at_likeliest - position.best))
                own.append((apart if math.isfinite(apart) else math.inf, highest - at_likeliest))
            found.append(own)
        return found


def _summed(name: str, windows: Sequence[Sequence[tuple[float, float]]]) -> tuple[Difference, list[float]]:
    pairs = [pair for window in windows for pair in window]
    apart = [each for each, _ in pairs]
    margins = [margin for _, margin in pairs if margin > 0]
    same = 1 - len(margins) / len(pairs)
    return Difference(name, max(apart), math.fsum(apart) / len(apart), same, max(margins, default=0.0)), apart


# --- The settings. ---

_LENGTHS = (1, 5, 17, 18, 40, 100)
_TOKENS = 12
_CHUNK = 7
_PREEMPT_EVERY = 3


@dataclass(frozen=True)
class Setting:
    """One setting. `difference`: where its answers are not those of the requests alone; "": they are the same bits.

    `happened`: what the setting is about took place (a preemption, a prefix hit), as often as it says.
    """

    name: str
    happened: int
    difference: str = ""


@dataclass(frozen=True)
class SelfCheck:
    """What `LLM.selfcheck` found. `print` shows it.

    Attributes:
        requests: how many requests were answered in each setting.
        promised: whether `llm.config.invariant` promises equal bits; `reason` says why (not).
        settings: in the order in which they were tried.
    """

    requests: int
    promised: bool
    reason: str
    settings: tuple[Setting, ...]

    @property
    def ok(self) -> bool:
        """Every setting gave the same bits."""
        return not any(setting.difference for setting in self.settings)

    def __str__(self) -> str:
        promise = "promised" if self.promised else "NOT promised"
        lines = [f"{self.requests} requests, alone and otherwise; equal bits are {promise}: {self.reason}"]
        for each in self.settings:
            lines.append(f"{each.name:<28} {each.happened:>4}  {each.difference or 'the same bits'}")
        return "\n".join(lines)

    __repr__ = __str__


def selfcheck(llm: LLM, engine: Engine) -> SelfCheck:
    """The lock is held and nothing is running."""
    config = engine.config
    rows = _rows(llm._preprocessor, config.model_config.vocab_size, config.model_config.max_model_len)
    check = _Check(engine, rows)
    settings = (
        check.setting("batched", check.batched, lambda outputs: len(outputs)),
        check.setting("in reverse order", lambda: check.batched(reverse=True), lambda outputs: len(outputs)),
        check.setting(f"in chunks of {_CHUNK} tokens", check.chunked, lambda outputs: len(outputs)),
        check.setting("preempted", check.preempted, _preemptions),
        check.setting("with prefix hits", check.with_hits, lambda outputs: sum(map(_hits, outputs))),
    )
    return SelfCheck(len(rows), config.invariant, config.reasons.get("invariant", ""), settings)


class _Check:
    """The requests, and their answers alone."""

    def __init__(self, engine: Engine, rows: Sequence[Row]) -> None:
        self._engine = engine
        self._rows = rows
        self._alone = [output for row in rows for output in self._run([row])]

    def setting(
        self, name: str, run: Callable[[], list[RequestOutput]], happened: Callable[[list[RequestOutput]], int]
    ) -> Setting:
        outputs = run()
        different = (_difference(*pair) for pair in zip(self._alone, outputs, strict=True))
        return Setting(name, happened(outputs), next((text for text in different if text), ""))

    def batched(self, reverse: bool = False) -> list[RequestOutput]:
        return self._run(self._rows[::-1])[::-1] if reverse else self._run(self._rows)

    def chunked(self) -> list[RequestOutput]:
        scheduler = self._engine.scheduler
        usual = scheduler.config
        scheduler.config = replace(usual, max_num_batched_tokens=_CHUNK, enable_chunked_prefill=True)
        try:
            return self._run(self._rows)
        finally:
            self._engine.scheduler.config = usual

    def preempted(self) -> list[RequestOutput]:
        steps = 0

        def preempt() -> None:
            nonlocal steps
            steps += 1
            if steps % _PREEMPT_EVERY == 0 and len(self._engine.scheduler.running) > 1:
                self._engine.scheduler.preempt_last()

        return self._run(self._rows, preempt)

    def with_hits(self) -> list[RequestOutput]:
        self._run(self._rows)
        return self._run(self._rows, keep_cache=True)

    def _run(
        self, rows: Sequence[Row], between: Callable[[], None] = lambda: None, keep_cache: bool = False
    ) -> list[RequestOutput]:
        engine = self._engine
        if not keep_cache:
            engine.reset_prefix_cache()
        states: list[PromptState] = []
        try:
            states = [engine.add(row) for row in rows]
            engine.run(states, between)
        except BaseException:
            engine.reset()
            raise
        return [state.output() for state in states]


def _rows(preprocessor: Preprocessor, vocabulary: int, longest: int) -> list[Row]:
    """Random tokens of many lengths, two of them with a common beginning; greedy and drawn."""
    draw = random.Random(0)
    ids = [[draw.randrange(vocabulary) for _ in range(length)] for length in _LENGTHS if length + _TOKENS <= longest]
    ids.append([*ids[-1][:-1], (ids[-1][-1] + 1) % vocabulary])
    most = min(_TOKENS, longest - 1)
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=most, ignore_eos=True, logprobs=2, detokenize=False
        )
        for index in range(len(ids))
    ]
    return preprocessor.rows([{"prompt_token_ids": each} for each in ids], params, SamplingParams)


def _difference(alone: RequestOutput, other: RequestOutput) -> str:
    """Where the first difference is; "" if there is none."""
    expected, actual = alone.outputs[0], other.outputs[0]
    prompt = f"a prompt of {len(alone.prompt_token_ids)} tokens"
    if actual.error is not None or expected.error is not None:
        return f"{prompt}: {actual.error or expected.error}"
    for place, pair in enumerate(zip(expected.token_ids, actual.token_ids, strict=False)):
        if pair[0] != pair[1]:
            return f"{prompt}: token {place} is {pair[1]}, alone {pair[0]}"
    if expected.logprobs != actual.logprobs:
        return f"{prompt}: the tokens are the same, their logprobs are not"
    return "" if len(expected.token_ids) == len(actual.token_ids) else f"{prompt}: another number of tokens"


def _preemptions(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)


def _hits(output: RequestOutput) -> int:
    return int(output.num_cached_tokens > 0)
