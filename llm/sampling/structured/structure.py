"""Compiles `StructuredOutputsParams` into a `Structure`, which constrains a request; and the answers as they grow.

A structure holds llguidance's grammar and, for a JSON schema, a regular expression or a choice, a `Language` that gives
the number of bytes that an answer still needs. llguidance computes the masks, with a matcher for each answer: copies of
a matcher would share a lexer, and one answer could use up its limits for the others. Where llguidance gives up, at one
of its limits, the `Language` goes on; where there is none, the answer fails.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from llm.base.locks import renewed_in_children
from llm.errors import ValidationError
from llm.outputs import StructuredOutcome
from llm.sampling.structured import first_line, refused, unusable
from llm.sampling.structured.json_schema import compile_schema, language_of
from llm.sampling.structured.language import EMPTY, IMPOSSIBLE, Language, Needs, TokenReader, grammar_of
from llm.sampling.structured.regex import NEEDED_BYTES, RegexBuilder, UnknownLength, ascii_classes, parse_regex
from llm.sampling.structured.schema import check_numbers, read_schema
from llm.sampling.structured.structural_tag import format_grammar, format_language, read_tags, special_bytes
from llm.sampling_params import SamplingParams, StructuredOutputsParams
from llm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger("llm")


_MOST_NODES = 50_000
# Up to this many tokens are read one by one, which is faster than reading the whole vocabulary.
_FEW = 256
_INTERFERING = (
    "allowed_token_ids bad_words logit_bias logits_processors extra_args stop stop_token_ids repetition_detection"
).split()
# llguidance's limits of one mask, ten times its own. Its lexer (14,000 units of fuel per millisecond) gets more only
# where there is no language to go on with.
_MORE_ITEMS = {"max_items_in_row": 20_000, "step_max_items": 500_000}
_MORE_FUEL = {"step_lexer_fuel": 2_000_000}


@dataclass
class Structure:
    """A compiled constraint.

    Attributes:
        grammar: in llguidance's form; None: the language alone computes the masks.
        language: None if the number of bytes an answer needs is not known; `why_unknown` then says why.
        root: the language's node of all answers.
        constraint: what was compiled: kind (json, regex, choice or grammar) and value.
        received: compiles it where it is unpickled, once, from the tokenizer's folder, the size of the vocabulary, the
            EOS token ids and the constraint.
    """

    vocabulary: Vocabulary
    grammar: str | None
    language: Language | None
    root: int
    why_unknown: str
    constraint: tuple[str, Any]
    received: Callable[..., Structure]
    lock: threading.Lock = field(default_factory=lambda: renewed_in_children(threading.Lock()))

    def __post_init__(self) -> None:
        self._needs = None if self.language is None else Needs(self.language, self.vocabulary.reader)
        self._nodes = 0 if self.language is None else len(self.language.kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        vocabulary = self.vocabulary
        return self.received, (vocabulary.folder, vocabulary.size, tuple(vocabulary.eos_token_ids), *self.constraint)

    @property
    def tokens_needed(self) -> int | None:
        """Tokens that suffice for the shortest answer without its EOS, one per byte; None if unknown."""
        return None if self.language is None else self.language.needs[self.root]

    def matcher(self) -> LLMatcher:
        """A new llguidance matcher at the beginning of an answer, with a lexer of its own; it may be in error."""
        library = self.vocabulary.llguidance
        limits = library.LLParserLimits(**_MORE_ITEMS, **({} if self.language is not None else _MORE_FUEL))
        return library.LLMatcher(self.vocabulary.tokenizer, self.grammar, log_level=0, limits=limits)

    def continuing(self, state: int) -> np.ndarray:
        """bool [vocab]: the tokens that continue an answer, by the language alone; EOS where the answer may end."""
        if self._needs is None or self.language is None:
            raise ValueError("this structure has no language")
        with self.lock:
            allowed = self._needs.after(state) < IMPOSSIBLE
            allowed[self.vocabulary.eos_token_ids] = self.language.nullable[state]
        return allowed

    def fitting(self, state: int, tokens: int, allowed: np.ndarray) -> np.ndarray:
        """bool [vocab]: the `allowed` tokens after which an answer can be completed in `tokens` more tokens."""
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
        """True if so many states were visited that compiling again is better."""
        return self.language is not None and len(self.language.kinds) - self._nodes > _MOST_NODES

    def outcome(self, params: SamplingParams, token_ids: Sequence[int]) -> StructuredOutcome:
        """The outcome of a request with these params and this output."""
        reason = self.why_not_guaranteed(params)
        return StructuredOutcome(self.is_complete(token_ids), not reason, reason)

    def why_not_guaranteed(self, params: SamplingParams) -> str:
        """Why an answer to a request with these params may be cut, or not be all that was asked for; "" if neither."""
        interfering = [name for name in _INTERFERING if getattr(params, name)]
        caveat = "" if self.language is None else self.language.caveat
        said = f"{interfering[0]} can mask or cut what an answer needs" if interfering else ""
        return self.why_unknown or caveat or said

    def read(self, state: int, token: int) -> int:
        if self.language is None:
            return state
        with self.lock:
            return self.language.read(state, self.vocabulary.token_bytes.get(token, b""))

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """True if these tokens, without a final EOS, are a complete answer."""
        kept = [token for token in token_ids if token not in self.vocabulary.eos_token_ids]
        if self.language is None:
            matcher = self.matcher()
            return bool(matcher.try_consume_tokens(kept) == len(kept) and matcher.is_accepting())
        texts = [self.vocabulary.token_bytes.get(token) for token in kept]
        if not all(texts):  # a token without a text
            return False
        with self.lock:
            return self.language.nullable[self.language.read(self.root, b"".join(text for text in texts if text))]

    def is_closed(self, token_ids: Sequence[int]) -> bool:
        """True if these tokens are a complete answer that nothing but its EOS can follow."""
        if not self.is_complete(token_ids):
            return False
        if self.language is None:
            matcher = self.matcher()
            matcher.consume_tokens(list(token_ids))
            return bool(matcher.is_stopped())
        data = b"".join(self.vocabulary.token_bytes.get(token, b"") for token in token_ids)
        with self.lock:
            state = self.language.read(self.root, data)
            return all(self.language.step(state, byte) == EMPTY for byte in range(256))


class ConstrainedAnswer:
    """The answer of one row as it grows.

    What is allowed is a function of the tokens read, because all of this state is the answer's own: the matcher
    computes the same masks in the same order, whether tokens come one by one or, after a preemption, at once.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._matcher = None if structure.grammar is None else structure.matcher()
        self._state = structure.root
        self._mask: np.ndarray | None = None
        self._has_ended = False

    def read(self, token: int) -> None:
        if self._mask is None:
            self._compute()
        self._mask = None
        self._has_ended = self._has_ended or token in self._structure.vocabulary.eos_token_ids
        if self._matcher is not None and not self._has_ended:
            self._matcher.consume_token(token)
        self._state = self._structure.read(self._state, token)

    def allowed(self, tokens: int) -> np.ndarray:
        """bool [vocab]: the tokens that may come next so that `tokens` more can complete the answer.

        Raises:
            RuntimeError: the answer is not complete and no token continues it, or llguidance failed.
        """
        if self._mask is None:
            self._mask = self._compute()
        fitting = self._structure.fitting(self._state, tokens, self._mask)
        return fitting if fitting.any() else self._mask

    def _compute(self) -> np.ndarray:
        structure, matcher = self._structure, self._matcher
        if self._has_ended:
            return self._only_eos()
        reason = "no token continues it"
        if matcher is not None:
            mask = self._mask_of(matcher)
            if not matcher.is_error() and (self._continues(mask) or matcher.is_accepting()):
                return mask
            message = first_line(matcher.get_error()) if matcher.is_error() else "NoExtension"
            reason = reason if message.startswith("NoExtension") else message
        if structure.language is not None:
            mask = structure.continuing(self._state)
            if mask.any():
                self._matcher = None  # it gave up at one of its limits
                return mask
        raise RuntimeError(f"structured_outputs cannot go on with this answer: {reason}.")

    def _mask_of(self, matcher: LLMatcher) -> np.ndarray:
        size = self._structure.vocabulary.size
        words = np.zeros(-(-size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)

    def _only_eos(self) -> np.ndarray:
        mask = np.zeros(self._structure.vocabulary.size, dtype=bool)
        mask[self._structure.vocabulary.eos_token_ids] = True
        return mask

    def _continues(self, mask: np.ndarray) -> bool:
        """True if the mask holds more than EOS."""
        return int(np.count_nonzero(mask)) > int(np.count_nonzero(mask[self._structure.vocabulary.eos_token_ids]))


class Vocabulary:
    """A tokenizer in llguidance's form, and the bytes of its tokens.

    Raises:
        ValidationError: llguidance is not installed, or cannot use this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = sorted(eos_token_ids)
        if not self.eos_token_ids:
            raise refused("the model has no EOS token to end an answer with")
        definition = None if tokenizer is None else tokenizer.to_json()
        if tokenizer is None or definition is None:
            raise refused("it needs a tokenizer that has a tokenizer.json")
        self.llguidance = _import_llguidance()
        try:
            self.tokenizer = self.llguidance.LLTokenizer(definition, n_vocab=vocab_size, eos_token=self.eos_token_ids)
        except Exception as error:  # from Rust, of any type
            raise refused(f"llguidance cannot use this tokenizer ({first_line(error)})") from error
        special = {token for token in range(vocab_size) if self.tokenizer.is_special_token(token)}
        texts = {token: self.tokenizer.decode_bytes([token]) for token in range(vocab_size) if token not in special}
        self.special_tokens = {self.tokenizer.decode_str([token]): token for token in sorted(special)}
        ends = set(self.eos_token_ids)
        specials = {token: special_bytes(name) for name, token in self.special_tokens.items() if token not in ends}
        self.token_bytes = texts | specials
        self.reader = TokenReader(self.token_bytes, vocab_size)
        self.size = vocab_size
        self.folder = tokenizer.folder

    @property
    def writes_text(self) -> bool:
        """With a token for each byte of a text, any answer can be generated byte by byte."""
        return self.reader.bytes_that_are_tokens >= NEEDED_BYTES

    @property
    def lacking(self) -> frozenset[int]:
        """The bytes of UTF-8 without a token; answers have none of them."""
        return frozenset(range(0xF5)) - self.reader.bytes_that_are_tokens


def _import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise ValidationError(
            "structured_outputs needs llguidance, which is not installed: pip install 'offline-llm[structured]'.",
            parameter="structured_outputs",
        ) from error
    return llguidance


# --- Compiling. ---

# What llguidance says of schemas that it does not follow: its advice is none that a user can take.
_NOT_FOLLOWED = ("Unimplemented keys", "oneOf constraints", "Unknown format", "min/maxProperties only supported")
_KEPT = 64  # compiled structures of one engine
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class StructureCompiler:
    """Compiles and caches the structures of one engine.

    Args:
        make_vocabulary: called when the first structure is compiled, because reading the tokenizer takes a moment.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[str, Structure] = OrderedDict()
        self._lock = renewed_in_children(threading.Lock())  # of what is kept, not held while one is compiled
        self._warned: set[str] = set()

    def compile(self, params: StructuredOutputsParams) -> Structure:
        """The structure of `params`; raises `ValidationError` if the schema, pattern or grammar is not usable."""
        kind, value = _kind(params)
        return self.get(kind, value)

    def get(self, kind: str, value: Any) -> Structure:
        """As `compile`, for a constraint as json, regex, choice or grammar."""
        key = json.dumps([kind, value], default=repr)
        with self._lock:
            found = self._kept.get(key)
        if found is None or found.is_large:
            found = self._compile(kind, value)
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def warn(self, reason: str) -> None:
        """Say once for each reason that answers may be cut."""
        if reason and reason not in self._warned:
            self._warned.add(reason)
            logger.warning(
                "structured_outputs: an answer is not guaranteed (%s); output.outputs[0].structured says whether it is "
                "complete.",
                reason,
            )

    def _compile(self, kind: str, value: Any) -> Structure:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        vocabulary = self._vocabulary
        language, root, why = _language(kind, value, vocabulary)
        if language is not None and not vocabulary.writes_text:
            language, why = None, "the vocabulary has no token for some bytes of texts"
        grammar = _grammar(vocabulary, kind, value, language, root, why)
        structure = Structure(vocabulary, grammar, language, root, why, (kind, value), _received)
        _check_beginning(structure, kind, value)
        return structure


@functools.lru_cache(maxsize=2)
def _compiler(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> StructureCompiler:
    """For structures that come from another process."""
    return StructureCompiler(lambda: Vocabulary(Tokenizer(folder), vocab_size, eos_token_ids))


def _received(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], kind: str, value: Any) -> Structure:
    return _compiler(folder, vocab_size, eos_token_ids).get(kind, value)


def _kind(params: StructuredOutputsParams) -> tuple[str, Any]:
    """(kind, value): the constraint as json, regex, choice or grammar."""
    if params.whitespace_pattern is not None:
        raise ValidationError(
            f"whitespace_pattern must be None, as JSON has no whitespace here, got {params.whitespace_pattern!r}.",
            parameter="whitespace_pattern",
            value=params.whitespace_pattern,
        )
    if params.json_object is not None:
        if params.json_object is not True:
            raise unusable("json_object", params.json_object, "it can only be True")
        return "json", {"type": "object"}
    if params.json is not None:
        return "json", read_schema(params.json, params.disable_additional_properties)
    if params.choice is not None:
        choices = params.choice
        if not isinstance(choices, list | tuple) or not choices or not all(isinstance(i, str) and i for i in choices):
            raise unusable("choice", choices, "it must be a list of at least one text, none of them empty")
        return "choice", list(dict.fromkeys(choices))
    if params.structural_tag is not None:
        return "structural_tag", read_tags(params.structural_tag, params.disable_additional_properties)
    kind = "regex" if params.regex is not None else "grammar"
    value = getattr(params, kind)
    if not isinstance(value, str) or not value:
        raise unusable(kind, value, "it must be a text that is not empty")
    return kind, value


def _check_beginning(structure: Structure, kind: str, value: object) -> None:
    """Refuse a grammar that no answer to can begin, such as one that is too large for llguidance."""
    try:
        ConstrainedAnswer(structure).allowed(IMPOSSIBLE)
    except RuntimeError as error:
        raise unusable(kind, value, first_line(error).rstrip(".")) from error


def _grammar(
    vocabulary: Vocabulary, kind: str, value: Any, language: Language | None, root: int, why: str
) -> str | None:
    """The constraint in llguidance's form; None where the language alone computes the masks."""
    if language is None or kind == "structural_tag":
        try:
            grammar = _written(vocabulary, kind, value)
        except ValueError as error:
            raise unusable(kind, value, first_line(error)) from error
        _check_grammar(vocabulary, kind, value, grammar, why)
        if kind == "json" and language is None:
            check_numbers(value, why)
        return grammar
    if not language.has_grammar:
        return None
    # Written from the language, so that both have the same answers: llguidance reads numbers as floats.
    matcher = vocabulary.llguidance.LLMatcher
    grammar = matcher.grammar_from_lark(grammar_of(language, root))
    return None if matcher.validate_grammar(grammar, vocabulary.tokenizer) else grammar


def _check_grammar(vocabulary: Vocabulary, kind: str, value: object, grammar: str, why: str) -> None:
    failed, messages = vocabulary.llguidance.LLMatcher.validate_grammar_with_warnings(grammar, vocabulary.tokenizer)
    if failed:
        said = first_line(messages[0])
        lacks_keywords = said.startswith(_NOT_FOLLOWED)
        reason = f"it cannot be followed ({why})" if lacks_keywords and kind == "json" else said
        raise unusable(kind, value, reason)
    for message in messages:
        logger.warning("structured_outputs: %s", first_line(message))


def _written(vocabulary: Vocabulary, kind: str, value: Any) -> str:
    llguidance = vocabulary.llguidance
    matcher = llguidance.LLMatcher
    if kind == "structural_tag":
        return llguidance.grammar_from("lark", format_grammar(value, _COMPACT, vocabulary.special_tokens))
    if kind == "json":
        return matcher.grammar_from_json_schema(json.dumps(value), overrides=_COMPACT)
    if kind == "regex":
        return matcher.grammar_from_regex(ascii_classes(value))
    if kind == "choice":
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(item) for item in value))
    return llguidance.grammar_from("grammar", value)


def _language(kind: str, value: Any, vocabulary: Vocabulary) -> tuple[Language | None, int, str]:
    """(language, root, reason if there is no language)."""

    def build(language: Language) -> int:
        if kind == "json":
            return compile_schema(language, value)
        builder = RegexBuilder(language)
        if kind == "regex":
            return builder.lexeme(parse_regex(builder, value, builder.characters))
        if kind == "choice":
            return builder.lexeme(builder.any_of(value))
        if kind == "structural_tag":
            return format_language(language, value, vocabulary.special_tokens)
        raise UnknownLength(f"there is none for a {kind}")

    return language_of(kind, value, build, vocabulary.lacking)
