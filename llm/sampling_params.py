"""SamplingParams: what a user may ask of one request, validated on construction.

Owns fields, defaults and ranges (vLLM's names and semantics, `max_tokens=None` excepted: the default is the room that
is left, not 16). Does not own what needs a model to judge (token ids in range, room in the context): see
`llm/engine/preprocess.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, NoReturn

from llm.errors import ValidationError

# Below this a temperature means greedy, and between it and MIN_TEMPERATURE it is raised to that: vLLM's two constants.
GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_SEED = 2**64 - 1


class RequestOutputKind(Enum):
    """What `RequestOutput`s carry while a request runs. `LLM.generate` always returns FINAL_ONLY."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """How to sample one request.

    Args:
        n: how many completions to draw for the prompt, 1 to 16384; the prompt is computed once.
        max_tokens: most tokens to generate; None: until the context is full.
        min_tokens: EOS and stop tokens cannot be drawn before this many tokens.
        temperature: 0 (below 1e-5) is greedy; up to 2.
        top_k: draw among the k likeliest tokens; 0 or -1: all.
        top_p: draw among the fewest likeliest tokens whose probabilities sum to top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        seed: makes the draws reproducible, 0 to 2**64 - 1; None (or -1): one is derived and recorded in the output.
        stop: string or strings that end the text (left out of it unless `include_stop_str_in_output`).
        stop_token_ids: token ids that end the request.
        ignore_eos: do not end at the model's EOS.
        logprobs: how many top logprobs to return per generated token, next to the sampled one's; 0: only that one;
            -1: the whole vocabulary.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of `text`.
        include_stop_str_in_output: keep the stop string or stop token in `text`.
        output_kind: accepted for vLLM's sake; `generate` returns final outputs.
        extra_args: for logits processors.

    Raises:
        ValidationError: a field is out of its range (`.parameter`, `.value`).
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        self._normalise()
        self.validate()
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or []))

    def _normalise(self) -> None:
        for item in dataclasses.fields(self):
            setattr(self, item.name, _plain_number(getattr(self, item.name)))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = _as_list("stop", stop, "a string or a list of them")
        tokens = _as_list("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self.stop_token_ids = [_plain_number(token) for token in tokens]
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.logprobs is True:
            self.logprobs = 1

    def validate(self) -> None:
        """Check every field again (the object is mutable); raises `ValidationError`."""
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _real("temperature", self.temperature, 0.0, 2.0)
        _integer("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, -1)
        self._validate_stops()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            _refuse("output_kind", self.output_kind, "a RequestOutputKind")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            _refuse("extra_args", self.extra_args, "a dict or None")

    def _validate_stops(self) -> None:
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "a non-empty string, or a list of them")
        if self.stop_strings and not self.detokenize:
            _refuse("stop", self.stop, "empty when detokenize=False, for stop strings are found in the text")
        for token in self.stop_token_ids or []:
            _integer("stop_token_ids", token, 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list it was normalised to."""
        return self.stop if isinstance(self.stop, list) else []

    def clone(self) -> SamplingParams:
        """A validated copy that shares no list or dict with this one; other objects in `extra_args` are shared."""
        return dataclasses.replace(self, extra_args=_copy_containers(self.extra_args))


def _refuse(name: str, value: Any, right: str) -> NoReturn:
    raise ValidationError(f"{name} must be {right}, got {value!r}.", parameter=name, value=value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    right = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        _refuse(name, value, right)


def _real(name: str, value: Any, low: float, high: float) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not low <= value <= high:  # NaN is on no side
        _refuse(name, value, f"a number from {low:g} to {high:g}")


def _plain_number(value: Any) -> Any:
    """NumPy's numbers as Python's; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _as_list(name: str, value: Any, right: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(name, value, right)
    return list(value)


def _copy_containers(value: Any) -> Any:
    """Lists and dicts copied all the way down, whatever they hold shared."""
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return [_copy_containers(item) for item in value] if type(value) is list else value
