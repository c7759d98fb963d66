"""Regular expressions as `Language`s of UTF-8 bytes.

Owns the supported syntax: literals, escapes, classes, `.`, groups, alternation, repetition (a lazy `?` does not change
what matches), and `^`, `$` at the ends. Other syntax (look-around, word boundaries, flags, Unicode classes) raises
`UnknownLength`: llguidance may still constrain the answer, but its length is not bounded. `\\d`, `\\w` and `\\s` match
ASCII only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from llm.sampling.structured.language import EMPTY, Language

T = TypeVar("T")

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_CLASSES: dict[str, list[tuple[int, int]]] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07}
_MAX_REPEATS = 100_000
LONGEST_PATTERN = 100_000
# The characters of several bytes that a vocabulary may lack, those of the unused planes, by the first of their bytes.
_PLANES = {0xF1: (0x40000, 0x7FFFF), 0xF2: (0x80000, 0xBFFFF), 0xF3: (0xC0000, 0xFFFFF), 0xF4: (0x100000, _LAST)}
# Without a token for each of these, characters that are used could not be written byte by byte.
NEEDED_BYTES = frozenset([*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)])

Ranges = list[tuple[int, int]]


class TooManyChoices(ValueError):
    """Masks for this constraint would take too long; the message says what is too large."""


class UnknownLength(ValueError):
    """No bound on the length is known for this schema or pattern."""


def ascii_classes(pattern: str) -> str:
    """The pattern with `\\d`, `\\w`, `\\s` replaced by ASCII classes, which llguidance reads the same way."""
    inside = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
    result, in_class, index = [], False, 0
    while index < len(pattern):
        piece = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        if len(piece) == 2 and piece[1] in inside:
            result.append(inside[piece[1]] if in_class else f"[{inside[piece[1]]}]")
        elif len(piece) == 2 and piece[1] in "DWS" and not in_class:
            result.append(f"[^{inside[piece[1].lower()]}]")
        else:
            in_class = piece == "[" or (in_class and piece != "]")
            result.append(piece)
        index += len(piece)
    return "".join(result)


class Builder(Protocol[T]):
    """What expressions are made with: a `Language`, or `Words` of one."""

    def cat(self, *parts: T) -> T: ...
    def alt(self, *choices: T) -> T: ...
    def repeat(self, node: T, low: int, high: int = -1) -> T: ...


class Word(NamedTuple):
    """A regular expression: its node in a language, and the same as text for llguidance."""

    node: int
    text: str


class Words:
    """Makes regular expressions in two forms at once, so that nothing can be said in one and not in the other."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def characters(self, ranges: Ranges) -> Word:
        """One character of the ranges."""
        text = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in _writable(self._language, ranges))
        return Word(utf8(self._language, ranges), f"[{text}]")

    def literal(self, text: str) -> Word:
        written = "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)
        return Word(self._language.literal(text.encode()), written)

    def any_of(self, texts: Iterable[str]) -> Word:
        """One of these strings."""
        lacking = self._language.lacking
        distinct = sorted(text for text in set(texts) if not lacking.intersection(text.encode()))
        written = "|".join(self.literal(text).text for text in distinct)
        return Word(self._language.words(text.encode() for text in distinct), f"(?:{written})")

    def cat(self, *parts: Word) -> Word:
        return Word(self._language.cat(*(part.node for part in parts)), "".join(part.text for part in parts))

    def alt(self, *choices: Word) -> Word:
        kept = [each for each in choices if each.node != EMPTY]
        if len(kept) <= 1:
            return kept[0] if kept else Word(EMPTY, "")
        return Word(self._language.alt(*(each.node for each in kept)), f"(?:{'|'.join(each.text for each in kept)})")

    def repeat(self, node: Word, low: int, high: int = -1) -> Word:
        if node.node == EMPTY:
            return self.cat() if low == 0 else node
        count = {(0, -1): "*", (1, -1): "+", (0, 1): "?"}.get((low, high), f"{{{low},{'' if high == -1 else high}}}")
        return Word(self._language.repeat(node.node, low, high), f"(?:{node.text}){count}")

    def machine(self, moves: list[list[tuple[int, int]]], accepts: list[bool]) -> Word:
        """As `Language.machine`; no regular expression is written for it, so there is no grammar."""
        self._language.has_grammar = False
        return Word(self._language.machine(moves, accepts), "")

    def lexeme(self, *wanted: Word, without: Sequence[Word] = ()) -> int:
        """The node of a grammar's word: the strings of all of the `wanted`, and `without` those of others."""
        others = [word for word in without if word.node != EMPTY]
        if any(word.node == EMPTY for word in wanted):
            return EMPTY
        text = " & ".join([f"/{word.text}/" for word in wanted] + [f"~/{word.text}/" for word in others])
        if len(wanted) == 1 and not others:
            return self._language.lexeme(wanted[0].node, text)
        try:
            node = self._language.all_of([word.node for word in wanted], [word.node for word in others])
        except ValueError as error:
            raise UnknownLength(str(error)) from error
        return self._language.lexeme(node, text)


def parse_regex(builder: Builder[T], pattern: str, characters: Callable[[Ranges], T]) -> T:
    """The expression of all strings that the whole `pattern` matches.

    Args:
        characters: ranges of code points -> the expression of one character.

    Raises:
        UnknownLength: the pattern uses syntax that is not supported here.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise TooManyChoices(f"a pattern has {len(pattern)} characters and at most {LONGEST_PATTERN} are read")
    return _Parser(builder, pattern, characters).parse()


def alternatives_of(pattern: str) -> list[str]:
    """The pattern's alternatives outside of groups, which have anchors of their own."""
    found, start, depth, index, in_class = [], 0, 0, 0, False
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            found.append(pattern[start:index])
            start = index + 1
        index += 1
    return [*found, pattern[start:]]


def utf8(language: Language, ranges: Sequence[tuple[int, int]]) -> int:
    """The node of the UTF-8 encodings of one character in any of the ranges, surrogates left out."""
    choices = []
    for low, high in _writable(language, ranges):
        for first, last in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if first <= last:
                choices += [_sequence(language, *piece) for piece in _same_length(first, last)]
    return language.alt(*choices)


def _writable(language: Language, ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The characters that can be written, of several bytes by the first of them."""
    if not language.lacking:
        return list(ranges)
    lacking = [(byte, byte) for byte in language.lacking if byte < 0x80]
    lacking += [bounds for byte, bounds in _PLANES.items() if byte in language.lacking]
    return [
        (max(low, first), min(high, last))
        for low, high in ranges
        for first, last in complement(lacking)
        if max(low, first) <= min(high, last)
    ]


def complement(ranges: Sequence[tuple[int, int]]) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return [*result, (start, _LAST)] if start <= _LAST else result


def byte_bits(low: int, high: int) -> int:
    return ((1 << (high - low + 1)) - 1) << low


def _same_length(low: int, high: int) -> list[tuple[bytes, bytes]]:
    """The range split where encodings get longer, as pairs of encodings."""
    pieces = []
    for limit in (0x7F, 0x7FF, 0xFFFF, _LAST):
        if low <= min(high, limit):
            pieces.append((chr(low).encode(), chr(min(high, limit)).encode()))
            low = limit + 1
    return pieces


def _sequence(language: Language, low: bytes, high: bytes) -> int:
    """All encodings from `low` to `high`, which have the same length."""
    if len(low) == 1:
        return language.byte_set(byte_bits(low[0], high[0]))
    if low[0] == high[0]:
        return language.cat(language.byte_set(1 << low[0]), _sequence(language, low[1:], high[1:]))
    least, most = bytes([0x80] * (len(low) - 1)), bytes([0xBF] * (len(low) - 1))
    choices = [
        language.cat(language.byte_set(1 << low[0]), _sequence(language, low[1:], most)),
        language.cat(language.byte_set(1 << high[0]), _sequence(language, least, high[1:])),
    ]
    if high[0] - low[0] > 1:
        between = language.byte_set(byte_bits(low[0] + 1, high[0] - 1))
        choices.append(language.cat(between, _sequence(language, least, most)))
    return language.alt(*choices)


class _Parser(Generic[T]):
    """Recursive descent: alternation, sequence, repetition, atom."""

    def __init__(self, builder: Builder[T], pattern: str, characters: Callable[[Ranges], T]) -> None:
        self._builder = builder
        self._pattern = pattern
        self._characters = characters
        self._at = 0

    def parse(self) -> T:
        node = self._alternation()
        if self._at < len(self._pattern):
            raise UnknownLength(f"an unmatched {self._pattern[self._at]!r}")
        return node

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise UnknownLength("a pattern that ends too early")
        self._at += 1
        return character

    def _alternation(self) -> T:
        choices = [self._concatenation()]
        while self._peek() == "|":
            self._take()
            choices.append(self._concatenation())
        return self._builder.alt(*choices)

    def _concatenation(self) -> T:
        parts = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repetition())
        return self._builder.cat(*parts)

    def _repetition(self) -> T:
        node = self._atom()
        while self._peek() and self._peek() in "*+?{":
            low, high = self._bounds()
            if self._peek() == "?":  # lazy
                self._take()
            if max(low, high) > _MAX_REPEATS or (high != -1 and high < low):
                raise UnknownLength("a repetition count that cannot be")
            node = self._builder.repeat(node, low, high)
        return node

    def _bounds(self) -> tuple[int, int]:
        sign = self._take()
        if sign != "{":
            return {"*": (0, -1), "+": (1, -1), "?": (0, 1)}[sign]
        match = re.match(r"(\d+)(,?)(\d*)\}", self._pattern[self._at :], re.ASCII)
        if not match:
            raise UnknownLength("an open brace")
        self._at += match.end()
        low = int(match[1])
        return low, low if not match[2] else int(match[3]) if match[3] else -1

    def _atom(self) -> T:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return self._characters(self._class())
        if character == ".":
            return self._characters(complement([(0x0A, 0x0A)]))
        if character == "\\":
            return self._characters(self._escape())
        if character in "^$":
            return self._anchor(character)
        if character in "*+?{":
            raise UnknownLength(f"a {character!r} with nothing before it")
        return self._characters([(ord(character), ord(character))])

    def _anchor(self, character: str) -> T:
        """An anchor at an end of the pattern has no effect, because the whole string must match."""
        if self._at == (1 if character == "^" else len(self._pattern)) and "|" not in self._pattern:
            return self._builder.cat()
        raise UnknownLength(f"a {character!r} inside")

    def _group(self) -> T:
        if self._peek() == "?":
            match = re.match(r"\?(:|P?<[A-Za-z_]\w*>)", self._pattern[self._at :], re.ASCII)
            if not match:
                raise UnknownLength("a group that looks around or sets flags")
            self._at += match.end()
        node = self._alternation()
        if self._take() != ")":
            raise UnknownLength("an open group")
        return node

    def _class(self) -> Ranges:
        negated = self._peek() == "^"
        if negated:
            self._take()
        ranges: Ranges = []
        while not ranges or self._peek() != "]":
            item = self._class_item()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                last = self._class_item()
                if len(item) != 1 or len(last) != 1 or item[0][0] != item[0][1] or last[0][0] < item[0][0]:
                    raise UnknownLength("a range without ends")
                item = [(item[0][0], last[0][1])]
            ranges += item
        self._take()
        return complement(ranges) if negated else ranges

    def _class_item(self) -> Ranges:
        character = self._take()
        if character == "\\":
            return self._escape()
        if character == "[" or (character in "&~-" and self._peek() == character):
            raise UnknownLength("a class inside a class")
        return [(ord(character), ord(character))]

    def _escape(self) -> Ranges:
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character.lower() in _CLASSES:
            return complement(_CLASSES[character.lower()])
        if character in _CONTROLS:
            return [(_CONTROLS[character], _CONTROLS[character])]
        if character in "xu":
            digits = self._pattern[self._at : self._at + (2 if character == "x" else 4)]
            if not re.fullmatch(r"[0-9A-Fa-f]{2}|[0-9A-Fa-f]{4}", digits):
                raise UnknownLength("an escape by number")
            self._at += len(digits)
            return [(int(digits, 16), int(digits, 16))]
        if character.isalnum():
            raise UnknownLength(f"the escape \\{character}")
        return [(ord(character), ord(character))]
