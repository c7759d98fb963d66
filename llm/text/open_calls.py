"""Calls that a model is still writing: a reply so far, closed where it stands, so that readers of whole calls read it.

Nothing is read here. A candidate is the reply up to a place, and what would close what is open there; a reader that
takes it for a call has checked it, and what the call says so far is the beginning of what it will say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from llm.base.types import JsonObject
from llm.text.tool_calls import MINIMAX_M2, QWEN3_CODER, SEED_OSS, STEP3, Tags

_MARKS = re.compile(r"""[][{}(),"'\\]""")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_DEEPEST = 1000
_TRIED = 4  # the last places where a value has ended or a list has begun
_TAGS = (QWEN3_CODER, SEED_OSS, STEP3, MINIMAX_M2)


def closed(text: str, start: int, writes_python: bool) -> Iterator[str]:
    """Candidates, those with most of the text first. `start`: where the first call begins.

    Args:
        writes_python: values are Python's: an argument is certain once the next one begins.
    """
    for tags in _TAGS:
        if tags.function in text[start:]:
            yield from _closed_tags(text, tags)
    if "<arg_key>" in text[start:]:
        yield from _closed_glm(text)
    yield from _closed_brackets(text, start, writes_python)


def certain_arguments(arguments: JsonObject) -> str:
    """What the arguments of a call that goes on begin with, as `ToolCall.to_dict` writes them."""
    text = json.dumps(arguments, ensure_ascii=False).rstrip('}]"')
    return text[: _before_escape(text)].rstrip("".join(map(chr, range(0xD800, 0xDC00))))  # half a character


def rest_of(sent: str, arguments: JsonObject) -> str:
    """What comes after `sent`, a beginning that was certain. An argument that was written twice has its last value: it
    is written again."""
    text = json.dumps(arguments, ensure_ascii=False)
    if text.startswith(sent):
        return text[len(sent) :]
    open_ = _scan(sent, 0, False)
    return f"{open_.quote}{open_.closing[:-1]}, {text[1:]}"


def _closed_tags(text: str, tags: Tags) -> Iterator[str]:
    start = text.rfind(tags.function)
    if text.find(tags.function_end, start) >= 0:
        return
    for before in (tags.argument_end, tags.close):
        place = text.rfind(before, start)
        if place >= 0:
            yield text[: place + len(before)] + tags.function_end + tags.around[1]


def _closed_glm(text: str) -> Iterator[str]:
    start, end = text.rfind("<tool_call>"), "</tool_call>"
    if start >= 0 and text.find(end, start) < 0:
        place = text.rfind("</arg_value>", start)
        if place >= 0:
            yield text[: place + len("</arg_value>")] + end


def _closed_brackets(text: str, start: int, writes_python: bool) -> Iterator[str]:
    found = _scan(text, start, writes_python)
    if found.quote and not writes_python:
        yield text[: _before_escape(text)] + found.quote + found.closing
    for end, closing in reversed(found.places):
        yield text[:end] + closing


@dataclass
class _Open:
    """What is open at the end of a text.

    Attributes:
        quote: of the text in it that has not ended.
        closing: what closes the brackets.
        places: where values have ended or brackets opened, and what closes those that are open there.
    """

    quote: str = ""
    closing: str = ""
    places: list[tuple[int, str]] = field(default_factory=list)


def _scan(text: str, start: int, writes_python: bool) -> _Open:
    found = _Open()
    after = start  # an escape
    for mark in _MARKS.finditer(text, start):
        letter, place, end = mark[0], mark.start(), 0
        if place < after:
            continue
        if found.quote:
            if letter == "\\":
                after = place + 2
            elif letter == found.quote:
                found.quote, end = "", place + 1
        elif letter in _CLOSING and (letter != "(" or writes_python):
            found.closing, end = _CLOSING[letter] + found.closing, place + 1
            if len(found.closing) > _DEEPEST:
                return _Open()  # no reader takes it
        elif found.closing and letter == found.closing[0]:
            found.closing, end = found.closing[1:], place + 1
        elif found.closing and letter == ",":
            end = place
        elif found.closing and (letter == '"' or (writes_python and letter == "'")):
            found.quote = letter
        if end and (not writes_python or (letter == "," and found.closing[0] == ")" and "))" not in found.closing)):
            found.places = [*found.places, (end, found.closing)][-_TRIED:]
    return found


def _before_escape(text: str) -> int:
    """Where a text that may end in a part of an escape, such as \\u00, ends without it."""
    found = text.rfind("\\", max(0, len(text) - 6))
    if found < 0:
        return len(text)
    while found > 0 and text[found - 1] == "\\":  # of several, the first is no part of another
        found -= 1
    while found < len(text) and text[found] == "\\":
        size = 6 if text[found + 1 : found + 2] == "u" else 2
        if found + size > len(text):
            return found
        found += size
    return len(text)
