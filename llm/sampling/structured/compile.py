"""Compiles `StructuredOutputsParams` into the `Structure` that constrains a request.

A structure holds llguidance's grammar and, for a JSON schema, a regular expression or a choice, a `Language` that gives
the number of bytes that an answer still needs. Owns what is refused before the request starts.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm.errors import ValidationError
from llm.sampling.structured.json_schema import compile_schema, language_of
from llm.sampling.structured.language import IMPOSSIBLE, Language
from llm.sampling.structured.lark import grammar_of
from llm.sampling.structured.messages import first_line, unusable
from llm.sampling.structured.regex import UnknownLength, Words, ascii_classes, parse_regex
from llm.sampling.structured.schema import check_numbers, read_schema
from llm.sampling.structured.structure import Answer, Structure, Vocabulary
from llm.sampling.structured.tag_format import format_grammar, format_language
from llm.sampling.structured.tags import read_tags
from llm.sampling_params import StructuredOutputsParams
from llm.text.tokenizer import Tokenizer

logger = logging.getLogger("llm")

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
        self._warned: set[str] = set()

    def compile(self, params: StructuredOutputsParams) -> Structure:
        """The structure of `params`; raises `ValidationError` if the schema, pattern or grammar is not usable."""
        kind, value = _kind(params)
        return self.get(kind, value)

    def get(self, kind: str, value: Any) -> Structure:
        """As `compile`, for a constraint as json, regex, choice or grammar."""
        key = json.dumps([kind, value], default=repr)
        if key not in self._kept or self._kept[key].is_large:
            self._kept[key] = self._compile(kind, value)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

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
        Answer(structure).allowed(IMPOSSIBLE)
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
        words = Words(language)
        if kind == "regex":
            return words.lexeme(parse_regex(words, value, words.characters))
        if kind == "choice":
            return words.lexeme(words.any_of(value))
        if kind == "structural_tag":
            return format_language(language, value, vocabulary.special_tokens)
        raise UnknownLength(f"there is none for a {kind}")

    return language_of(kind, value, build, vocabulary.lacking)
