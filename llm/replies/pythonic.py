"""Readers of tool calls that are written as Python: `[weather(city="Paris"), rest()]`, as Llama 4, LFM2 and OLMo 3 do.

Owns those forms. Nothing is executed: a call is a name and keyword arguments that are literals, read here character by
character. A call with positional arguments, names or expressions is none, for it does not say what is meant by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from llm.base.types import JsonObject
from llm.replies.calls import Call, Found, Schemas
from llm.replies.tagged import MOST_TRIED, blocks, json_calls, skip_space, without
from llm.replies.untyped import fitting, types_of

T = TypeVar("T")

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""},
    **{letter: letter for letter in "\\'\""},
}
_CODES = {"x": 2, "u": 4, "U": 8}
_DEEPEST = 50  # lists and dicts inside each other
_LONGEST_NUMBER = 400  # characters


class _NoCall(Exception):
    """What stands there is no call."""


def pythonic(text: str, schemas: Schemas) -> Found:
    """[name(argument=value), ...], in a text."""
    rest: list[str] = []
    calls: list[Call] = []
    last, place, tried = 0, 0, 0
    while (found := text.find("[", place)) >= 0 and tried < MOST_TRIED:
        got = listed_calls(text, found, schemas)
        place = found + 1
        if got is None:
            tried += 1
            continue
        rest.append(text[last:found])
        calls += got[0]
        last = place = got[1]
    if not calls:
        return text, []
    return without("".join([*rest, text[last:]]), ("<|python_start|>", "<|python_end|>", "<|python_tag|>")), calls


def between(begin: str, end: str) -> Callable[[str, Schemas], Found]:
    """A reader of calls between two tags, as a list or one below the other, or JSON; the second tag may be missing."""

    def read(text: str, schemas: Schemas) -> Found:
        failed: list[int] = []

        def read_at(text: str, place: int) -> tuple[list[Call], int] | None:
            place = skip_space(text, place)
            if len(failed) > MOST_TRIED:
                return None
            if text[place : place + 1] in ("[", "{"):
                found = listed_calls(text, place, schemas) or json_calls(text, place)
            else:
                found = _lines(text, place, schemas)
            failed.extend([place] if found is None else [])
            return found

        return blocks(text, begin, end, read_at)

    return read


def listed_calls(text: str, place: int, schemas: Schemas) -> tuple[list[Call], int] | None:
    """The calls of a list that begins at `place`, and where it ends; None: it is no list of calls."""
    reader = _Reader(text, place + 1)
    try:
        calls = reader.items("]", lambda: reader.call(schemas))
    except _NoCall:
        return None
    return (calls, reader.place) if calls else None


def _lines(text: str, place: int, schemas: Schemas) -> tuple[list[Call], int] | None:
    """Calls with white space between, up to what is none; `print(call)` is the call."""
    reader = _Reader(text, place)
    calls: list[Call] = []
    try:
        while reader.at_name():
            printed = reader.take("print(")
            call = reader.call(schemas)
            if printed and not reader.take(")"):
                break
            calls.append(call)
            place = reader.place
            reader.skip()
    except _NoCall:  # of this one; those before it are whole
        pass
    return (calls, place) if calls else None


class _Reader:
    """Reads Python's literals and calls from a place on; every method raises `_NoCall` where there is none."""

    def __init__(self, text: str, place: int) -> None:
        self._text = text
        self.place = place
        self._depth = 0

    def skip(self) -> None:
        self.place = skip_space(self._text, self.place)

    def take(self, expected: str) -> bool:
        """Pass over these characters and white space before them, if they come next."""
        self.skip()
        found = self._text.startswith(expected, self.place)
        self.place += len(expected) if found else 0
        return found

    def at_name(self) -> bool:
        return self._text[self.place : self.place + 1].isidentifier()

    def call(self, schemas: Schemas) -> Call:
        name = self._name(".-")
        if not self.take("("):
            raise _NoCall
        types = types_of(schemas.get(name))
        arguments: JsonObject = {}

        def argument() -> None:
            own = self._name("")
            if not self.take("=") or own in arguments:
                raise _NoCall
            self.skip()
            start = self.place
            value = self._value()
            arguments[own] = fitting(value, self._text[start : self.place], types(own))

        self.items(")", argument)
        return name, arguments

    def items(self, end: str, read: Callable[[], T]) -> list[T]:
        """Items with commas between them, and the end; the opening bracket was read."""
        found: list[T] = []
        while not self.take(end):
            if found and not self.take(","):
                raise _NoCall
            if found and self.take(end):  # a comma may come last
                break
            found.append(read())
        return found

    def _name(self, also: str) -> str:
        """A name of Python's, in which some other characters may be."""
        self.skip()
        start = self.place
        while self.place < len(self._text) and (
            self._text[self.place].isalnum() or self._text[self.place] in f"_{also}"
        ):
            self.place += 1
        name = self._text[start : self.place]
        if not name[:1].isidentifier():
            raise _NoCall
        return name

    def _value(self) -> object:
        self.skip()
        first = self._text[self.place : self.place + 1]
        if first in ("'", '"') and first:
            return self._string(first)
        if first and first in "-+.0123456789":
            return self._number()
        if first and first in "[({":
            self.place += 1
            self._depth += 1
            if self._depth > _DEEPEST:
                raise _NoCall
            value = self._container(first)
            self._depth -= 1
            return value
        word = self._name("")
        if word not in _WORDS:
            raise _NoCall
        return _WORDS[word]

    def _container(self, first: str) -> object:
        if first == "[":
            return self.items("]", self._value)
        if first == "(":
            values = self.items(")", self._value)
            before = self.place - 2
            while self._text[before].isspace():
                before -= 1
            return values[0] if len(values) == 1 and self._text[before] != "," else values
        found: JsonObject = {}

        def pair() -> None:
            name = self._value()
            if not isinstance(name, str) or not self.take(":"):
                raise _NoCall
            found[name] = self._value()

        self.items("}", pair)
        return found

    def _number(self) -> int | float:
        start = self.place
        while self.place < len(self._text) and self.place - start < _LONGEST_NUMBER:
            letter = self._text[self.place]
            is_sign = letter in "+-" and (self.place == start or self._text[self.place - 1] in "eE")
            if not (letter.isascii() and (letter.isalnum() or letter in "._")) and not is_sign:
                break
            self.place += 1
        written = self._text[start : self.place]
        bare = written.lstrip("+-")
        is_whole = not set(bare) & set(".eE") or bare[:2] in ("0x", "0X")
        try:
            value = int(written, 0) if is_whole else float(written)
        except ValueError:
            raise _NoCall from None
        if isinstance(value, float) and not math.isfinite(value):
            raise _NoCall
        return value

    def _string(self, quote: str) -> str:
        text = self._text
        end = quote * 3 if text.startswith(quote * 3, self.place) else quote
        place = self.place + len(end)
        pieces: list[str] = []
        while not text.startswith(end, place):
            if place >= len(text) or (text[place] == "\n" and len(end) == 1):
                raise _NoCall
            if text[place] != "\\":
                pieces.append(text[place])
                place += 1
                continue
            letter = text[place + 1 : place + 2]
            digits = text[place + 2 : place + 2 + _CODES.get(letter, 0)]
            if letter in _CODES:
                pieces.append(_character(digits, _CODES[letter]))
            else:
                pieces.append(_ESCAPES.get(letter, "\\" + letter))
            place += 2 + len(digits)
        self.place = place + len(end)
        return "".join(pieces)


def _character(digits: str, count: int) -> str:
    try:
        if len(digits) == count and digits.isalnum():
            return chr(int(digits, 16))
    except (ValueError, OverflowError):
        pass
    raise _NoCall
