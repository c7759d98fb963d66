"""From `StructuredOutputsParams` to what rows are constrained by.

Owns the calls of llguidance, which is an extra, and what is compiled: a grammar of llguidance's, and, for a JSON
schema, a regular expression or a choice, a language of ours that knows how many bytes an answer still needs.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llm.base.errors import ValidationError
from llm.outputs import StructuredOutcome
from llm.sampling.structured.json_schema import compile_schema
from llm.sampling.structured.language import IMPOSSIBLE, Language, Needs, TokenReader
from llm.sampling.structured.regex import UnknownLength, ascii_classes, parse_regex
from llm.sampling_params import SamplingParams, StructuredOutputsParams
from llm.tokenizer import Tokenizer

logger = logging.getLogger("llm")

_KEPT = 64  # compiled structures of one engine
_MOST_NODES = 50_000
# Up to so many tokens are read one by one, which is sooner done than reading the whole vocabulary.
_FEW = 256
_INTERFERING = (
    "allowed_token_ids bad_words logit_bias logits_processors extra_args stop stop_token_ids repetition_detection"
).split()
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
# Bytes of UTF-8 text, the controls apart: with a token for each of them any answer can be written one byte at a time.
_TEXT_BYTES = frozenset([*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)])


@dataclass
class Structure:
    """What a completion must be.

    Attributes:
        language: None when the bytes an answer needs are not known; `why_unknown` then says why.
        root: the node of all answers.
    """

    vocabulary: Vocabulary
    prototype: Any
    language: Language | None
    root: int
    why_unknown: str
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._needs = None if self.language is None else Needs(self.language, self.vocabulary.reader)

    @property
    def tokens_needed(self) -> int | None:
        """Enough tokens for the shortest answer, its EOS apart: one a byte. None when no bound is known."""
        return None if self.language is None else self.language.needs[self.root]

    def matcher(self) -> Any:
        """llguidance's, at the beginning of an answer."""
        return self.prototype.deep_copy()

    def fitting(self, state: int, tokens: int, allowed: np.ndarray) -> np.ndarray:
        """bool [vocab]: those of the `allowed` tokens after which an answer can be completed in `tokens` more."""
        if self._needs is None or self.language is None or self.language.reach[self.root] <= tokens:
            return allowed
        ids = np.flatnonzero(allowed)
        with self.lock:
            if len(ids) > _FEW:
                fits = allowed & (self._needs.after(state) <= tokens)
            else:
                fits = np.zeros_like(allowed)
                fits[[token for token in ids.tolist() if self._needed_after(state, token) <= tokens]] = True
        ends = self.vocabulary.eos_token_ids
        fits[ends] = allowed[ends]
        return fits

    def _needed_after(self, state: int, token: int) -> int:
        data = self.vocabulary.token_bytes.get(token)
        return self.language.needs[self.language.read(state, data)] if self.language and data else IMPOSSIBLE

    @property
    def is_large(self) -> bool:
        """Whether so many states were met that it is better compiled anew."""
        return self.language is not None and len(self.language.kinds) > _MOST_NODES

    def outcome(self, params: SamplingParams, token_ids: Sequence[int]) -> StructuredOutcome:
        """What became of a request with these params and this output."""
        reason = self.why_unknown
        for name in _INTERFERING:
            if getattr(params, name):
                reason = reason or f"{name} can bar or cut what an answer needs"
        return StructuredOutcome(self.is_complete(token_ids), not reason, reason)

    def read(self, state: int, token: int) -> int:
        if self.language is None:
            return state
        with self.lock:
            return self.language.read(state, self.vocabulary.token_bytes.get(token, b""))

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens, an EOS at their end apart, are a whole answer."""
        matcher = self.matcher()
        kept = [token for token in token_ids if token not in self.vocabulary.eos_token_ids]
        return bool(matcher.try_consume_tokens(kept) == len(kept) and matcher.is_accepting())


class Vocabulary:
    """A tokenizer as llguidance sees it, and the bytes of its tokens.

    Raises:
        ValidationError: llguidance is not installed, or cannot use this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = sorted(eos_token_ids)
        if not self.eos_token_ids:
            raise _refused("the model has no EOS token to end an answer with")
        definition = None if tokenizer is None else tokenizer.to_json()
        if definition is None:
            raise _refused("it needs a tokenizer that has a tokenizer.json")
        self.llguidance = _import_llguidance()
        try:
            self.tokenizer = self.llguidance.LLTokenizer(definition, n_vocab=vocab_size, eos_token=self.eos_token_ids)
        except Exception as error:  # of Rust: any
            raise _refused(f"llguidance cannot use this tokenizer ({_first_line(error)})") from error
        special = {token for token in range(vocab_size) if self.tokenizer.is_special_token(token)}
        texts = {token: self.tokenizer.decode_bytes([token]) for token in range(vocab_size) if token not in special}
        self.token_bytes = texts
        self.reader = TokenReader(texts, vocab_size)
        self.size = vocab_size

    @property
    def writes_every_byte(self) -> bool:
        return self.reader.bytes_that_are_tokens >= _TEXT_BYTES


class StructureCompiler:
    """Compiles and keeps the structures of one engine.

    Args:
        make_vocabulary: called when the first structure is asked for; reading the tokenizer takes a moment.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[str, Structure] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Structure:
        """Raises `ValidationError` with one sentence that says what is wrong with the schema, pattern or grammar."""
        kind, value = _kind(params)
        key = json.dumps([kind, value, params.disable_additional_properties], default=repr)
        if key not in self._kept or self._kept[key].is_large:
            self._kept[key] = self._compile(kind, value)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _compile(self, kind: str, value: Any) -> Structure:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        vocabulary = self._vocabulary
        matcher = vocabulary.llguidance.LLMatcher
        try:
            grammar = _grammar(vocabulary.llguidance, kind, value)
        except ValueError as error:
            raise _bad(kind, value, _first_line(error)) from error
        failed, messages = matcher.validate_grammar_with_warnings(grammar, vocabulary.tokenizer)
        if failed:
            raise _bad(kind, value, _first_line(messages[0]))
        for message in messages:
            logger.warning("structured_outputs: %s", _first_line(message))
        prototype = matcher(vocabulary.tokenizer, grammar, log_level=0)
        language, root, why = _language(kind, value)
        if language is not None and not vocabulary.writes_every_byte:
            language, why = None, "the vocabulary has no token for every byte"
        return Structure(vocabulary, prototype, language, root, why)


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValidationError(
            "structured_outputs needs llguidance, which is not installed: pip install 'offline-llm[structured]'.",
            parameter="structured_outputs",
        ) from error
    return llguidance


def _kind(params: StructuredOutputsParams) -> tuple[str, Any]:
    """What is asked for, in one of four ways: json, regex, choice, grammar."""
    if params.whitespace_pattern is not None:
        raise ValidationError(
            f"whitespace_pattern must be None, for JSON is written compactly, got {params.whitespace_pattern!r}.",
            parameter="whitespace_pattern",
            value=params.whitespace_pattern,
        )
    if params.json_object is not None:
        if params.json_object is not True:
            raise _bad("json_object", params.json_object, "it can only be True")
        return "json", {"type": "object"}
    if params.json is not None:
        return "json", _schema(params.json, params.disable_additional_properties)
    if params.choice is not None:
        choices = params.choice
        if not isinstance(choices, list | tuple) or not choices or not all(isinstance(i, str) and i for i in choices):
            raise _bad("choice", choices, "it must be a list of at least one text, none of them empty")
        return "choice", list(choices)
    kind = "regex" if params.regex is not None else "grammar"
    value = getattr(params, kind)
    if not isinstance(value, str) or not value:
        raise _bad(kind, value, "it must be a text that is not empty")
    return kind, value


def _schema(given: Any, closed: bool) -> Any:
    """The schema as Python objects: from a dict, from JSON text, or of a pydantic model."""
    if hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError) as error:
        raise _bad("json", given, f"it is no JSON ({_first_line(error)})") from error
    except RecursionError:
        raise _bad("json", "...", "it is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise _bad("json", given, "a schema is a JSON object")
    return _rewritten(schema, closed)


def _rewritten(schema: Any, closed: bool) -> Any:
    """`\\d`, `\\w`, `\\s` of patterns written out; with `closed`, objects have no properties but their own."""
    if isinstance(schema, list):
        return [_rewritten(item, closed) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _rewritten(value, closed) for key, value in schema.items()}
    if isinstance(schema.get("pattern"), str) and schema.get("type") == "string":
        result["pattern"] = ascii_classes(schema["pattern"])
    if closed and schema.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def _grammar(llguidance: Any, kind: str, value: Any) -> str:
    matcher = llguidance.LLMatcher
    if kind == "json":
        return matcher.grammar_from_json_schema(json.dumps(value), overrides=_COMPACT)
    if kind == "regex":
        return matcher.grammar_from_regex(ascii_classes(value))
    if kind == "choice":
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(item) for item in dict.fromkeys(value)))
    return llguidance.grammar_from("grammar", value)


def _language(kind: str, value: Any) -> tuple[Language | None, int, str]:
    """(language, its root, why there is none)."""
    language = Language()
    try:
        if kind == "json":
            root = compile_schema(language, value)
        elif kind == "regex":
            root = parse_regex(language, value)
        elif kind == "choice":
            root = language.alt(*(language.literal(item.encode()) for item in value))
        else:
            return None, 0, "the length of an answer to a grammar is not known"
        language.close()
    except UnknownLength as error:
        return None, 0, f"the length of an answer is not known: {error}"
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # a keyword of a shape that is not read here
        return None, 0, f"the length of an answer is not known: {type(error).__name__}"
    if language.needs[root] >= IMPOSSIBLE:
        return None, 0, "no answer of a known length was found"
    return language, root, ""


def _refused(reason: str) -> ValidationError:
    return ValidationError(f"structured_outputs cannot be used: {reason}.", parameter="structured_outputs")


def _bad(kind: str, value: Any, reason: str) -> ValidationError:
    return ValidationError(f"the {kind} of structured_outputs is not usable: {reason}.", parameter=kind, value=value)


def _first_line(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    details = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]  # of a regex
    return ": ".join([lines[0].rstrip(".:"), *details[:1]])
