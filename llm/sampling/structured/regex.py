"""Regular expressions as `Language`s of UTF-8 bytes; and numbers and formats of strings as regular expressions.

The supported syntax: literals, escapes, classes, `.`, groups, alternation, repetition (a lazy `?` does not change
what matches), and `^`, `$` at the ends. Other syntax (look-around, word boundaries, flags, Unicode classes) raises
`UnknownLength`: llguidance may still constrain the answer, but its length is not bounded. `\\d`, `\\w` and `\\s` match
ASCII only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
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
    """What expressions are made with: a `Language`, or `RegexBuilder` of one."""

    def cat(self, *parts: T) -> T: ...
    def alt(self, *choices: T) -> T: ...
    def repeat(self, node: T, low: int, high: int = -1) -> T: ...


class BuiltRegex(NamedTuple):
    """A regular expression: its node in a language, and the same as text for llguidance."""

    node: int
    text: str


class RegexBuilder:
    """Makes regular expressions in two forms at once, so that nothing can be said in one and not in the other."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def characters(self, ranges: Ranges) -> BuiltRegex:
        """One character of the ranges."""
        text = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in _writable(self._language, ranges))
        return BuiltRegex(utf8(self._language, ranges), f"[{text}]")

    def literal(self, text: str) -> BuiltRegex:
        written = "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)
        return BuiltRegex(self._language.literal(text.encode()), written)

    def any_of(self, texts: Iterable[str]) -> BuiltRegex:
        """One of these strings."""
        lacking = self._language.lacking
        distinct = sorted(text for text in set(texts) if not lacking.intersection(text.encode()))
        written = "|".join(self.literal(text).text for text in distinct)
        return BuiltRegex(self._language.words(text.encode() for text in distinct), f"(?:{written})")

    def cat(self, *parts: BuiltRegex) -> BuiltRegex:
        return BuiltRegex(self._language.cat(*(part.node for part in parts)), "".join(part.text for part in parts))

    def alt(self, *choices: BuiltRegex) -> BuiltRegex:
        kept = [each for each in choices if each.node != EMPTY]
        if len(kept) <= 1:
            return kept[0] if kept else BuiltRegex(EMPTY, "")
        return BuiltRegex(
            self._language.alt(*(each.node for each in kept)), f"(?:{'|'.join(each.text for each in kept)})"
        )

    def repeat(self, node: BuiltRegex, low: int, high: int = -1) -> BuiltRegex:
        if node.node == EMPTY:
            return self.cat() if low == 0 else node
        count = {(0, -1): "*", (1, -1): "+", (0, 1): "?"}.get((low, high), f"{{{low},{'' if high == -1 else high}}}")
        return BuiltRegex(self._language.repeat(node.node, low, high), f"(?:{node.text}){count}")

    def machine(self, moves: list[list[tuple[int, int]]], accepts: list[bool]) -> BuiltRegex:
        """As `Language.machine`; no regular expression is written for it, so there is no grammar."""
        self._language.has_grammar = False
        return BuiltRegex(self._language.machine(moves, accepts), "")

    def lexeme(self, *wanted: BuiltRegex, without: Sequence[BuiltRegex] = ()) -> int:
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


# Numbers as regular expressions of their digits: ranges, decimals with bounds, multiples, and other spellings. Patterns
# grow with the square of a bound's digits. Multiples that the last digits do not tell are an automaton of the
# remainders.


def integer_range(low: int | None, high: int | None) -> str:
    """A regular expression for the integers from `low` to `high`, without leading zeros; None: no limit."""
    if low is not None and high is not None and low > high:
        raise UnknownLength("a range without numbers")
    parts = []
    if low is None or low < 0:
        largest = None if low is None else -low
        smallest = 0 if high is None or high >= 0 else -high  # -0 is an integer
        parts.append(f"-({_digits(smallest, largest)})")
    if high is None or high >= 0:
        parts.append(_digits(max(0, low or 0), high))
    return "|".join(parts)


def _digits(low: int, high: int | None) -> str:
    """Decimal numbers from `low` to `high`, both at least 0."""
    length = len(str(low))
    if high is None:
        return f"{_digits(low, 10**length - 1)}|[1-9][0-9]{{{length},}}"
    parts = []
    for size in range(length, len(str(high)) + 1):
        first, last = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        parts.append(_same_size(str(first), str(last)))
    return "|".join(parts)


def _same_size(low: str, high: str) -> str:
    if not low:
        return ""
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _grouped(_same_size(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [low[0] + _grouped(_same_size(low[1:], "9" * rest)), high[0] + _grouped(_same_size("0" * rest, high[1:]))]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)


def _grouped(pattern: str) -> str:
    return f"({pattern})" if "|" in pattern else pattern


# --- Numbers within bounds. ---

_WHOLE = "(0|[1-9][0-9]*)"
DECIMAL = rf"-?{_WHOLE}(\.[0-9]+)?"
FRACTION = rf"-?{_WHOLE}\.[0-9]*[1-9][0-9]*"


def exact(value: float) -> Decimal:
    return Decimal(str(value))


def _parts(value: Decimal) -> tuple[int, str]:
    """The whole part of a number that is at least 0, and the digits after its point without zeros at the end."""
    whole, _, digits = format(value, "f").partition(".")
    return int(whole), digits.rstrip("0")


def at_least(bound: Decimal, is_strict: bool) -> str:
    if bound < 0 or (bound == 0 and not is_strict):
        return f"{_WHOLE}(\\.[0-9]+)?|-({_up_to(-bound, is_strict)})"
    return _from(bound, is_strict)


def at_most(bound: Decimal, is_strict: bool) -> str:
    if bound > 0 or (bound == 0 and not is_strict):
        return f"-{_WHOLE}(\\.[0-9]+)?|{_up_to(bound, is_strict)}"
    return f"-({_from(-bound, is_strict)})"


def _from(bound: Decimal, is_strict: bool) -> str:
    """Decimals without a sign from `bound`, at least 0, on."""
    whole, digits = _parts(bound)
    larger = [digits[:i] + f"[{int(d) + 1}-9][0-9]*" for i, d in enumerate(digits) if d != "9"]
    larger.append(digits + ("[0-9]*[1-9][0-9]*" if is_strict else "[0-9]*"))
    tail = f"\\.({'|'.join(larger)})" if digits or is_strict else r"(\.[0-9]+)?"
    return f"({_digits(whole + 1, None)})(\\.[0-9]+)?|{whole}{tail}"


def _up_to(bound: Decimal, is_strict: bool) -> str:
    """Decimals without a sign up to `bound`, at least 0."""
    whole, digits = _parts(bound)
    below = [f"({_digits(0, whole - 1)})(\\.[0-9]+)?"] if whole else []
    if not digits:
        return "|".join([*below, *([] if is_strict else [rf"{whole}(\.0+)?"])]) or "x{0}[^\\x00-\\uffff]"
    smaller = [digits[:i] + f"[0-{int(d) - 1}][0-9]*" for i, d in enumerate(digits) if d != "0"]
    smaller += [digits[:i] for i in range(1, len(digits))]
    smaller += [] if is_strict else [digits + "0*"]
    return "|".join([*below, str(whole), rf"{whole}\.({'|'.join(smaller)})"])


def ending_in(divisor: int) -> str:
    """Integers that are multiples of a divisor of 1000, which their last three digits say."""
    ends = range(0, 1000, divisor)
    short = "|".join(str(value) for value in ends)
    return f"-?({short}|[1-9][0-9]*({'|'.join(f'{value:03d}' for value in ends)}))"


def multiple_of(divisor: Fraction) -> str | None:
    """Decimals that are multiples of a fraction, which the digits after the point say where it divides 1."""
    places = next((n for n in range(1, 4) if (divisor * 10**n).denominator == 1), None)
    if places is None or divisor.numerator <= 0 or 10**places % int(divisor * 10**places):
        return None
    endings = [f"{value:0{places}d}" for value in range(0, 10**places, int(divisor * 10**places))]
    texts = sorted({text for each in endings for text in (each, each.rstrip("0") or "0")})
    return rf"-?{_WHOLE}(\.({'|'.join(texts)})0*)?"


def remainders(numerator: int, places: int, with_points: bool) -> tuple[list[list[tuple[int, int]]], list[bool]]:
    """An automaton of the decimals that are multiples of numerator / 10**places: its moves, and which states accept."""
    # States: the start, after "-", after a leading zero, then (digits after the point or -1, remainder, is "." next).
    states: dict[tuple[int, int, int], int] = {(-2, 0, 0): 0, (-2, 0, 1): 1, (-2, 0, 2): 2}
    left = list(states)
    moves: list[list[tuple[int, int]]] = []
    accepts = []
    for depth, remainder, extra in left:
        targets: dict[tuple[int, int, int], int] = {}

        def move(byte: int, state: tuple[int, int, int], targets: dict[tuple[int, int, int], int] = targets) -> None:
            targets[state] = targets.get(state, 0) | 1 << byte

        is_start = depth == -2 and extra < 2
        digits = range(10) if depth != -2 or is_start else ()
        if depth == -2 and extra == 0:
            move(0x2D, (-2, 0, 1))
        for digit in digits:
            if is_start:
                move(0x30 + digit, (-1, digit * 10**places % numerator, 0) if digit else (-2, 0, 2))
            elif depth == -1:
                move(0x30 + digit, (-1, (10 * remainder + digit * 10**places) % numerator, 0))
            elif depth < places:
                move(0x30 + digit, (depth + 1, (remainder + digit * 10 ** (places - depth - 1)) % numerator, 0))
            elif digit == 0:
                move(0x30, (depth, remainder, 1))
        if with_points and (depth == -1 or (depth == -2 and extra == 2)):
            move(0x2E, (0, remainder, 0))
        for state in targets:
            if state not in states:
                states[state] = len(states)
                left.append(state)
        moves.append([(bits, states[state]) for state, bits in targets.items()])
        accepts.append(remainder == 0 and not is_start)
    return moves, accepts


def spellings(value: Decimal) -> str:
    """All ways to write a number without an exponent."""
    whole, digits = _parts(abs(value))
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return sign + (rf"{whole}\.{digits}0*" if digits else rf"{whole}(\.0+)?")


_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-{_DAY})|{_LEAP}-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_GROUP = "[0-9A-Fa-f]{1,4}"

# The formats of strings that are looked at; all others say nothing, as in JSON Schema.
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DATE}T{_CLOCK}{_ZONE}",
    "duration": (
        "P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
        "(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))?"
        "|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))"
    ),
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": (
        f"(({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,7}}:|({_GROUP}:){{1,6}}:{_GROUP}|({_GROUP}:){{1,5}}(:{_GROUP}){{1,2}}"
        f"|({_GROUP}:){{1,4}}(:{_GROUP}){{1,3}}|({_GROUP}:){{1,3}}(:{_GROUP}){{1,4}}|({_GROUP}:){{1,2}}(:{_GROUP}){{1,5}}"
        f"|{_GROUP}:(:{_GROUP}){{1,6}}|:((:{_GROUP}){{1,7}}|:))"
    ),
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+",
}
