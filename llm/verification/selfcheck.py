"""`LLM.selfcheck`: the same requests alone and in other company, on the loaded model.

Owns the settings and the report. What the engine guarantees is that tokens and logprobs are equal bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llm.engine.engine import Engine
from llm.engine.output import PromptState
from llm.engine.preprocess import Preprocessor
from llm.engine.rows import Row
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.api import LLM

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
            engine.scheduler.blocks.reset_prefix_cache()
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
