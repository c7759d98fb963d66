"""SamplingParams, StructuredOutputsParams and BeamSearchParams: parameters of one request, validated on construction.

Names and semantics are vLLM's except for the table below. Checks that need a model (token ids in range, room in the
context) are in `llm/engine/preprocess.py`; `llm/sampling/structured` compiles the form of an answer.

    Different from vLLM, on purpose
    max_tokens                  default None, until the context is full; vLLM: 16
    n > 1 and greedy            n equal completions; vLLM refuses it
    seed                        None is derived from the engine's seed and recorded in the output; n completions share
                                a seed and differ in the sample index that keys their draws; vLLM: seed + i
    max_logprobs                no limit unless `LLM(max_logprobs=)` sets one; vLLM: 20
    bad_words                   both spellings, with and without a leading space, are always barred; vLLM leaves the
                                second out when it has another number of tokens
    ignore_eos and min_tokens   EOS can be drawn before min_tokens too, as it ends nothing; vLLM bars it
    logit_bias                  values are not clipped, -inf is allowed; NaN and +inf are refused
    top_k, top_p, min_p         unchanged (without effect) when the temperature is 0; vLLM resets them
    errors                      `ValidationError`, a ValueError with `.parameter` and `.value`

    Beyond vLLM
    logits_processors           callables for this request alone, or Hugging Face's `LogitsProcessor` objects
    truncate_prompt_tokens      keep the last tokens of a prompt that is too long
    origins, print(params)      where each value came from (`RequestOutput.params`)

    What to do instead of vLLM's fields that are not here, of names that it has dropped, and of transformers' names is
    in `llm/base/suggestions.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from llm.base.checks import (
    as_list,
    check_containers,
    check_flag,
    check_integer,
    check_real,
    check_strings,
    copy_containers,
    is_real,
    known_fields,
    plain_number,
    refuse,
)
from llm.base.suggestions import SAMPLING, STRUCTURED
from llm.base.vllm_paths import missing_names

if TYPE_CHECKING:
    from llm.inside.request import InsideRequest

if TYPE_CHECKING:
    import torch

# vLLM's constants: a temperature below the first means greedy, and any other below the second is raised to it.
GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_SEED = 2**64 - 1
MAX_LOGPROB_TOKEN_IDS = 128
_MOST_DIGITS = 20
_FLAGS = (
    "flat_logprobs ignore_eos detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output"
).split()
_MOST_PENALTY = 100.0  # length ** penalty stays a float
_BEAM_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


class RequestOutputKind(Enum):
    """What `RequestOutput`s carry while a request runs. `LLM.generate` always returns FINAL_ONLY."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@known_fields()
@dataclass
class RepetitionDetectionParams:
    """End a request whose output repeats itself, with `finish_reason="repetition"`.

    Args:
        max_pattern_size: longest pattern searched for, in tokens; 0: none.
        min_pattern_size: shortest; 0 means 1.
        min_count: how many times the pattern must repeat at the end of the output, at least 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        check_integer("max_pattern_size", self.max_pattern_size, 0)
        check_integer("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        check_integer("min_count", self.min_count, 2 if self.max_pattern_size else 0)


class PydanticModel(Protocol):
    """What is used of a pydantic model, a class."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]: ...
    @classmethod
    def model_validate_json(cls, json_data: str) -> object: ...


@known_fields(STRUCTURED)
@dataclass
class StructuredOutputsParams:
    """A constraint on the output: exactly one of `json` (a schema, as dict or text, or a pydantic model), `regex`,
    `choice`, `grammar`, `json_object` or `structural_tag` (`{"structures": [{"begin", "schema", "end"}], "triggers":
    [...]}`: free text in which each beginning is followed by JSON of its schema and its end; or `{"format": {"type":
    ...}}`, xgrammar's formats: tag, triggered_tags, tags_with_separator, sequence, or, json_schema, regex,
    const_string, any_text). The other fields are settings of these, as in vLLM.

    JSON has no whitespace, whatever `disable_any_whitespace` says. `\\d`, `\\w` and `\\s` match ASCII only. Needs
    llguidance. `CompletionOutput.structured` holds the outcome, and `CompletionOutput.parsed` a JSON answer as data.

    Of a pydantic model the field `json` has the schema, and `disable_additional_properties` is True: answers have the
    model's fields alone, unless it says `extra="allow"`. They are parsed by the model.
    """

    json: str | Mapping[str, object] | type[PydanticModel] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, object] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            refuse("structured_outputs", given, f"given exactly one of {', '.join(kinds)}")
        self._model: type[PydanticModel] | None = None
        if isinstance(self.json, type):
            if not hasattr(self.json, "model_json_schema"):
                refuse("json", self.json.__name__, "a schema, or a pydantic model")
            self._model = self.json if hasattr(self.json, "model_validate_json") else None
            self.json = self.json.model_json_schema()
            self.disable_additional_properties = True

    def parse(self, text: str) -> object:
        """A complete answer as data: an instance of the pydantic model, or what `json.loads` gives.

        None where the model's own validators refuse it, and of constraints other than JSON.
        """
        if self.json is None and self.json_object is None:
            return None
        try:
            return json.loads(text) if self._model is None else self._model.model_validate_json(text)
        except (ValueError, RecursionError):  # a pydantic ValidationError is a ValueError
            return None

    def __getstate__(self) -> dict[str, object]:
        """Without the model, which another process may not be able to import."""
        return {**vars(self), "_model": None}


@known_fields(SAMPLING)
@dataclass(repr=False)
class SamplingParams:
    """How to sample one request.

    Args:
        n: number of completions of the prompt, 1 to 16384; the prompt is computed once.
        presence_penalty: subtracted from the logit of every token in the output, -2 to 2.
        frequency_penalty: subtracted once for each occurrence of the token in the output, -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, above 0.
        temperature: 0 (below 1e-5) is greedy; up to 2.
        top_p: draw among the smallest set of likeliest tokens whose probabilities sum to top_p, in (0, 1].
        top_k: draw among the k likeliest tokens; 0 or -1: all.
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        seed: makes the draws reproducible, 0 to 2**64 - 1; None (or -1): one is derived, and recorded in the output.
        stop: string or strings that end the text; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the request.
        ignore_eos: do not stop at the model's EOS.
        max_tokens: maximum number of generated tokens; None: until the context is full.
        min_tokens: EOS and stop tokens cannot be drawn before this many tokens, and stop strings do not end the text.
        logprobs: number of top logprobs per generated token, beside the sampled token's; 0: only that one; -1: all.
        prompt_logprobs: the same per prompt token.
        prompt_logprob_token_ids: int [rows, ids], a list of ids for each prompt token after `prompt_logprob_start` + 1
            whose logprobs `RequestOutput.prompt_token_id_logprobs` has; -1 stands for none.
        prompt_logprob_start: the position before the first scored prompt token; None: 0.
        logprob_token_ids: return the logprobs of these ids per generated token, instead of the top ones.
        flat_logprobs: return logprobs as `FlatLogprobs` (flat lists) instead of a list of dicts.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of `text`.
        spaces_between_special_tokens: False has no effect with a tokenizer.json, and is refused with other tokenizers.
        include_stop_str_in_output: keep the stop string or stop token in `text`.
        output_kind: accepted for compatibility with vLLM; `generate` returns final outputs.
        structured_outputs: a constraint on the output, a `StructuredOutputsParams`.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: the only token ids that may be drawn.
        extra_args: arguments of logits processors.
        bad_words: words that may not appear; the token that would complete one is masked.
        skip_reading_prefix_cache: compute the whole prompt; None: only if prompt_logprobs need it.
        thinking_token_budget: most tokens of a reasoning section, whose end is then forced; -1: no limit.
        repetition_detection: end a request that repeats itself.
        logits_processors: callables (output ids, logits [vocab]) or (prompt ids, output ids, logits) -> logits, or
            Hugging Face's `LogitsProcessor`s, for this request, applied after all others and before the penalties;
            the `n` completions share them.
        truncate_prompt_tokens: keep this many of the prompt's last tokens; -1: as many as leave room for max_tokens.

    Raises:
        ValidationError: a field is out of its range (`.parameter`, `.value`).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logits_processors: list[Callable[..., torch.Tensor]] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self._origins: dict[str, tuple[object, str]] = {}
        # Set by the engine on its own copy: every id that ends the request, bad_words and reasoning's (start, end).
        self.all_stop_token_ids: frozenset[int] = frozenset()
        self.bad_words_token_ids: list[list[int]] = []
        self.thinking_token_ids: tuple[list[int], list[int]] | None = None
        self.structure: Any = None  # compiled `structured_outputs`, a llm.sampling.structured.structure.Structure
        self.inside: InsideRequest | None = None  # resolved captures and interventions of `extra_args`
        self.validate()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """The constructor with None for defaults, and OpenAI's rules for `logit_bias`: keys may be strings, and values
        are clipped to -100 and 100."""
        bias = fields.get("logit_bias")
        if isinstance(bias, Mapping):
            fields["logit_bias"] = {_token_id(key): _clipped(value) for key, value in bias.items()}
        kept = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        return cls(**kept)

    def _normalise(self) -> None:
        for name in _FIELDS:
            setattr(self, name, plain_number(getattr(self, name)))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = as_list("stop", stop, "a string or a list of them")
        self.stop_token_ids = as_list("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self.bad_words = as_list("bad_words", self.bad_words, "a list of strings")
        check_strings("bad_words", self.bad_words)
        self.bad_words = list(dict.fromkeys(self.bad_words))
        for name in ("logprob_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, as_list(name, getattr(self, name), "a list of token ids"))
        if self.prompt_logprob_token_ids is not None:
            name, right = "prompt_logprob_token_ids", "a list of token ids for each scored prompt token"
            rows = as_list(name, self.prompt_logprob_token_ids, right)
            self.prompt_logprob_token_ids = [as_list(name, row, right) for row in rows]
        if self.logits_processors is not None:
            self.logits_processors = as_list("logits_processors", self.logits_processors, "a list of callables")
        if isinstance(self.logit_bias, Mapping):
            self.logit_bias = {plain_number(key): plain_number(value) for key, value in self.logit_bias.items()}
        self.seed = None if isinstance(self.seed, int) and self.seed == -1 else self.seed
        self.top_k = 0 if isinstance(self.top_k, int) and self.top_k == -1 else self.top_k
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs

    def validate(self) -> None:
        """Check every field again (the object is mutable), and bring it to its form; raises `ValidationError`."""
        self._normalise()
        check_integer("n", self.n, 1, MAX_N)
        self._validate_lengths()
        self._validate_penalties()
        check_real("temperature", self.temperature, 0.0, 2.0)
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            refuse("top_k", self.top_k, "an integer of at least 1, or 0 or -1 for all tokens")
        check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            refuse("top_p", self.top_p, "above 0 and at most 1")
        check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs", "thinking_token_budget"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)
        self._validate_logprobs()
        self._validate_prompt_logprobs()
        self._validate_stops()
        self._validate_tokens()
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            check_flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if self.skip_reading_prefix_cache is False and self.scores_prompt:
            refuse("skip_reading_prefix_cache", False, "True or None with prompt_logprobs, which compute the prompt")
        self._validate_objects()

    def _validate_lengths(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        kept = self.truncate_prompt_tokens
        if kept is not None and not (isinstance(kept, int) and kept == -1):
            check_integer("truncate_prompt_tokens", kept, 1)

    def _validate_penalties(self) -> None:
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        value = self.repetition_penalty
        if not is_real(value) or not 0.0 < value < math.inf:
            refuse("repetition_penalty", value, "a finite number above 0")

    def _validate_logprobs(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        for token in ids:
            check_integer("logprob_token_ids", token, 0)
        if not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS:
            refuse("logprob_token_ids", ids, f"1 to {MAX_LOGPROB_TOKEN_IDS} token ids")
        if self.logprobs is not None and self.logprobs != len(ids):
            refuse("logprobs", self.logprobs, f"None or the number of logprob_token_ids ({len(ids)})")

    def _validate_prompt_logprobs(self) -> None:
        if self.prompt_logprob_token_ids is None:
            if self.prompt_logprob_start is not None:
                refuse("prompt_logprob_start", self.prompt_logprob_start, "None without prompt_logprob_token_ids")
            return
        if self.prompt_logprob_start is not None:
            check_integer("prompt_logprob_start", self.prompt_logprob_start, 0)
        if not any(self.prompt_logprob_token_ids):
            refuse("prompt_logprob_token_ids", self.prompt_logprob_token_ids, "a list with at least one token id")
        for row in self.prompt_logprob_token_ids:
            for token in row:
                check_integer("prompt_logprob_token_ids", token, -1)

    def _validate_stops(self) -> None:
        check_strings("stop", self.stop_strings)
        if self.stop_strings and not self.detokenize:
            refuse("stop", self.stop, "empty when detokenize=False, for stop strings are found in the text")
        for token in self.stop_token_ids or []:
            check_integer("stop_token_ids", token, 0)
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or []))

    def _validate_tokens(self) -> None:
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                refuse("allowed_token_ids", self.allowed_token_ids, "None or at least one token id")
            for token in self.allowed_token_ids:
                check_integer("allowed_token_ids", token, 0)
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            refuse("logit_bias", self.logit_bias, "a dict from token id to number")
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias", token, 0)
            if not is_real(bias) or not bias < math.inf:  # false for NaN
                refuse("logit_bias", bias, "a dict from token id to a number below infinity")

    def _validate_objects(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            refuse("output_kind", self.output_kind, "a RequestOutputKind")
        kinds = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
        for name, kind in {"extra_args": dict, **kinds}.items():
            if not isinstance(value := getattr(self, name), kind | None):
                refuse(name, value, f"a {kind.__name__} or None")
        check_containers("extra_args", self.extra_args)
        for processor in self.logits_processors or []:
            if not callable(processor) or isinstance(processor, type):
                refuse("logits_processors", processor, "a list of callables (classes go to LLM(logits_processors=))")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def scores_prompt(self) -> bool:
        """True if logprobs of prompt tokens are asked for."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def clone(self) -> SamplingParams:
        """A validated copy that shares no list or dict with this one. Other objects in `extra_args` are shared."""
        cloned = dataclasses.replace(self, extra_args=copy_containers("extra_args", self.extra_args))
        cloned._origins = dict(self._origins)
        return cloned

    def copy_validated(self) -> SamplingParams:
        """`clone` without validating again, for one request each of params that were just validated."""
        copied = copy.copy(self)
        copied.extra_args = copy_containers("extra_args", self.extra_args)
        copied._origins = dict(self._origins)
        return copied

    @property
    def origins(self) -> dict[str, str]:
        """Field -> origin of its value: "default", "given", or the origin recorded by `set_from`."""
        return {name: self._origin(name) for name in _FIELDS}

    def set_from(self, origin: str, **fields: object) -> None:
        """Set fields and record the origin of their values, without checks."""
        for name, value in fields.items():
            setattr(self, name, value)
            self._origins[name] = (value, origin)

    def _origin(self, name: str) -> str:
        value = getattr(self, name)
        if name in self._origins and self._origins[name][0] == value:
            return self._origins[name][1]
        return "default" if self._is_default(name) else "given"

    def _is_default(self, name: str) -> bool:
        value, default = getattr(self, name), _FIELDS[name]
        return value == default or (default is None and value == [])

    def __repr__(self) -> str:
        """A constructor call with the fields that differ from their defaults."""
        shown = [f"{name}={getattr(self, name)!r}" for name in _FIELDS if not self._is_default(name)]
        return f"SamplingParams({', '.join(shown)})"

    def __str__(self) -> str:
        """With recorded origins, a table of the fields that differ from their defaults; else the repr."""
        if not self._origins:
            return repr(self)
        shown = [name for name in _FIELDS if self._origin(name) != "default"]
        return "\n".join(f"{name:<24} {getattr(self, name)!r}  ({self._origin(name)})" for name in shown)


def _token_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < _MOST_DIGITS else key


def _clipped(bias: object) -> object:
    return min(100.0, max(-100.0, bias)) if is_real(bias) else bias


_FIELDS: dict[str, object] = {item.name: item.default for item in dataclasses.fields(SamplingParams)}


@known_fields({"n": "beam_width sequences are returned"})
@dataclass
class BeamSearchParams:
    """The parameters of a beam search.

    The score of a sequence is the sum of the logprobs of its generated tokens / (their number, EOS included) **
    `length_penalty`: the score of transformers and of vLLM.

    Args:
        beam_width: number of sequences kept at each step, and returned.
        max_tokens: maximum number of generated tokens.
        ignore_eos: do not stop at the model's EOS.
        temperature: 0.0 only, because beams are ranked by the model's own logprobs.
        length_penalty: above 0 favours long sequences (scores are negative), below 0 short ones.
        include_stop_str_in_output: keep the EOS that ended a sequence in its `tokens` and `text`.
        structured_outputs: only answers of this form are searched; logprobs are not renormalised.
        watermarking: None only.
        skip_special_tokens: leave special tokens out of `text`.
        allowed_token_ids: the only token ids that beams may be extended by; logprobs are not renormalised over them.
        early_stopping: when the search of a prompt ends, as in transformers. True: once `beam_width` sequences have
            ended. False: also when the best running beam, at its current length, scores no better than the worst
            finished one. "never": as False, but with `length_penalty` above 0 at the maximum length of the beam.

    Raises:
        ValidationError: a field is out of its range (`.parameter`, `.value`).
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: None = None
    allowed_token_ids: list[int] | None = None
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field again (the object is mutable); raises `ValidationError`."""
        for name in ("beam_width", "max_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name in _BEAM_FLAGS:
            check_flag(name, getattr(self, name))
        check_real("length_penalty", self.length_penalty, -_MOST_PENALTY, _MOST_PENALTY)
        if not is_real(self.temperature) or self.temperature != 0:
            refuse("temperature", self.temperature, "0.0, as beams are ranked by the model's own logprobs")
        if self.watermarking is not None:
            refuse("watermarking", self.watermarking, "None in a beam search")
        if self.structured_outputs is not None and self.ignore_eos:
            refuse("ignore_eos", True, "False with structured_outputs, for an answer ends where it is complete")
        early = self.early_stopping
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            refuse("early_stopping", self.early_stopping, "True, False or 'never'")
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list | tuple) or not self.allowed_token_ids:
                refuse("allowed_token_ids", self.allowed_token_ids, "None or a list of at least one token id")
            for token in self.allowed_token_ids:
                check_integer("allowed_token_ids", token, 0)


if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
