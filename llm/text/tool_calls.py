"""Reads tool calls from what a model wrote: as JSON, as texts between tags, or as Python.

Malformed calls are no error: they stay in the text. Nothing is executed, and texts are searched for fixed strings,
never by regular expressions, whose time a reply could drive up. `tool_forms.py` says which model writes which form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from llm.base.types import JsonObject

# (name, arguments).
Call = tuple[str, JsonObject]
# What of a text is no call, and the calls.
Found = tuple[str, list[Call]]
# The JSON schema of each function's arguments, by its name.
Schemas = Mapping[str, JsonObject]


def call_of(data: object, needs_arguments: bool = False) -> Call | None:
    """The call that is `{"name": ..., "arguments": {...}}`, or "parameters"; None: it is no call."""
    if isinstance(data, Mapping) and isinstance(data.get("function"), Mapping):  # as histories have it
        data = data["function"]
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    if needs_arguments and not {"arguments", "parameters"} & data.keys():
        return None
    arguments = json_object(data.get("arguments", data.get("parameters", {})))
    return None if arguments is None else (data["name"], arguments)


def json_object(given: object) -> JsonObject | None:
    """An object, or a text that is one."""
    if isinstance(given, str):
        given = json_value(given)
    return dict(given) if isinstance(given, Mapping) else None


def json_value(text: str) -> object:
    """The value; None if the text is not JSON."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def leading_json(text: str, start: int) -> tuple[object, int] | None:
    """The JSON value that begins at or after white space at `start`, and where it ends; None if there is none."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


# (text, place after the tag) -> the calls that stand there and where they end; None: there is none.
ReadAt = Callable[[str, int], tuple[list[Call], int] | None]

# JSON, behind a tag or between two: Hermes, Granite, Mistral, DeepSeek, ...

# Places where a text with braces is tried for a call that no tag announces.
MOST_TRIED = 100


def blocks(text: str, begin: str, end: str, read: ReadAt) -> Found:
    """Read what follows each `begin`; an `end` after it is dropped, and a block that is no call stays in the text."""
    rest: list[str] = []
    calls: list[Call] = []
    last, place = 0, 0
    while (found := text.find(begin, place)) >= 0:
        place = found + len(begin)
        got = read(text, place)
        if got is not None:
            rest.append(text[last:found])
            calls += got[0]
            last = place = past(text, got[1], end)
    return "".join([*rest, text[last:]]), calls


def past(text: str, place: int, end: str) -> int:
    """The place after `end`, if it comes next; white space before it is passed over."""
    after = skip_space(text, place)
    return after + len(end) if end and text.startswith(end, after) else place


def skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def json_calls(text: str, place: int) -> tuple[list[Call], int] | None:
    """{"name": ..., "arguments": {...}}, or a list of them."""
    value = leading_json(text, place)
    items = [] if value is None else value[0] if isinstance(value[0], list) else [value[0]]
    calls = [call for item in items if (call := call_of(item)) is not None]
    return (calls, value[1]) if value is not None and calls and len(calls) == len(items) else None


def json_between(*pairs: tuple[str, str]) -> Callable[[str], Found]:
    """A reader of JSON between one of these pairs of tags; the second tag may be missing."""

    def read(text: str) -> Found:
        begin, end = next((pair for pair in pairs if pair[0] in text), pairs[0])
        return blocks(text, begin, end, json_calls)

    return read


def llama3_json(text: str) -> Found:
    """{"name": ..., "parameters": {...}}, in a text; several of them have ; between."""
    rest: list[str] = []
    calls: list[Call] = []
    last, place, tried = 0, 0, 0
    while (found := text.find("{", place)) >= 0 and tried < MOST_TRIED:
        value = leading_json(text, found)
        call = None if value is None else call_of(value[0], needs_arguments=True)
        place = found + 1 if value is None else value[1]
        if call is None:
            tried += 1
            continue
        between = text[last:found]
        rest.append("" if calls and between.strip() in ("", ";") else between)
        calls.append(call)
        last = place
    if not calls:
        return text, []
    return "".join([*rest, text[last:]]).replace("<|python_tag|>", ""), calls


def mistral(text: str) -> Found:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, once for each call."""
    return blocks(text, "[TOOL_CALLS]", "", _mistral_calls)


def _mistral_calls(text: str, place: int) -> tuple[list[Call], int] | None:
    if text[skip_space(text, place) :][:1] in ("[", "{"):
        return json_calls(text, place)
    brace = text.find("{", place)
    value = leading_json(text, brace) if brace >= 0 else None
    name = text[place:brace].partition("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
    arguments = None if value is None else json_object(value[0])
    return None if value is None or arguments is None or not name else ([(name, arguments)], value[1])


def deepseek(text: str) -> Found:
    """A name and its arguments, between DeepSeek's tokens; V3 and R1 put a kind before, and the JSON into a fence."""
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    rest, calls = blocks(text, begin, end, _deepseek_call)
    outer = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
    return without(rest, outer) if calls and begin not in rest else rest, calls


def _deepseek_call(text: str, place: int) -> tuple[list[Call], int] | None:
    separator, brace = text.find("<｜tool▁sep｜>", place), text.find("{", place)  # noqa: RUF001
    value = leading_json(text, brace) if brace > separator >= 0 else None
    arguments = None if value is None else json_object(value[0])
    if value is None or arguments is None:
        return None
    between = text[separator + len("<｜tool▁sep｜>") : brace]  # noqa: RUF001
    name, fence, _ = between.partition("```json")
    name = (name if fence else text[place:separator]).strip()
    return ([(name, arguments)], past(text, value[1], "```" if fence else "")) if name else None


def kimi_k2(text: str) -> Found:
    """functions.name:0 and its arguments, between Kimi K2's tokens."""
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    rest, calls = blocks(text, begin, end, _kimi_call)
    outer = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return without(rest, outer) if calls and begin not in rest else rest, calls


def _kimi_call(text: str, place: int) -> tuple[list[Call], int] | None:
    tag = "<|tool_call_argument_begin|>"
    separator = text.find(tag, place)
    value = leading_json(text, separator + len(tag)) if separator >= 0 else None
    arguments = None if value is None else json_object(value[0])
    name = text[place:separator].strip().rpartition(":")[0].removeprefix("functions.")
    return None if value is None or arguments is None or not name else ([(name, arguments)], value[1])


def without(text: str, tags: tuple[str, ...]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return text


# Arguments as texts between tags: Qwen3-Coder, GLM, Seed-OSS, Step 3, MiniMax M2. A text becomes a value by the
# function's schema. A call that was cut off is none.

_OF_JSON: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MOST_REFERENCES = 32


@dataclass(frozen=True)
class Tags:
    """What stands around functions and their arguments: `<function=name>`, `<parameter=name>`, a text, and the ends.

    Attributes:
        close: ends the name of a function or an argument.
        around: what stands around each call; it is dropped with the call.
        outer: what stands around all calls.
        line: what comes between the tags of functions and arguments, where a model writes them.
        pad: what comes on each side of a value, and is not part of it.
    """

    function: str
    argument: str
    close: str
    argument_end: str
    function_end: str
    around: tuple[str, str]
    outer: tuple[str, ...] = ()
    line: str = "\n"
    pad: str = ""


QWEN3_CODER = Tags(
    *("<function=", "<parameter=", ">", "</parameter>", "</function>"), ("<tool_call>", "</tool_call>"), pad="\n"
)
SEED_OSS = Tags(
    *("<function=", "<parameter=", ">", "</parameter>", "</function>"), ("<seed:tool_call>", "</seed:tool_call>")
)
STEP3 = Tags(
    *('<steptml:invoke name="', '<steptml:parameter name="', '">', "</steptml:parameter>", "</steptml:invoke>"),
    ("<｜tool_call_begin｜>", "<｜tool_call_end｜>"),  # noqa: RUF001
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_sep｜>"),  # noqa: RUF001
    line="",
)
MINIMAX_M2 = Tags(
    *('<invoke name="', '<parameter name="', '">', "</parameter>", "</invoke>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)


def tool_call(text: str, schemas: Schemas, tags: Tags = QWEN3_CODER) -> Found:
    """<tool_call>, and what Hermes, Qwen3-Coder or GLM write in it.

    Models with one template write more than one of them, and Qwen3-Coder leaves <tool_call> out.
    """
    begin, end = tags.around
    if begin not in text:
        return tagged_functions(text, schemas, tags)
    return blocks(text, begin, end, partial(_tool_call_at, tags=tags, schemas=schemas))


def _tool_call_at(text: str, place: int, tags: Tags, schemas: Schemas) -> tuple[list[Call], int] | None:
    place = skip_space(text, place)
    if text[place : place + 1] in ("{", "["):
        return json_calls(text, place)
    if not text.startswith(tags.function, place):
        return _glm_call(text, place, tags.around[1], schemas)
    calls: list[Call] = []
    while text.startswith(tags.function, start := skip_space(text, place)):
        found = _function(text, start + len(tags.function), tags, schemas)
        if found is None:
            return None
        calls += found[0]
        place = found[1]
    return calls, place


def tagged_functions(text: str, schemas: Schemas, tags: Tags) -> Found:
    """<function=name><parameter=name>a text</parameter></function>, with these tags."""
    return blocks(text, tags.function, "", partial(_function, tags=tags, schemas=schemas))


def step3(text: str, schemas: Schemas) -> Found:
    """Functions between Step 3's tokens; a kind and the name may stand before the function."""
    begin, end = STEP3.around

    def read(text: str, place: int) -> tuple[list[Call], int] | None:
        stop = text.find(end, place)
        start = text.find(STEP3.function, place, len(text) if stop < 0 else stop)
        return None if start < 0 else _function(text, start + len(STEP3.function), STEP3, schemas)

    rest, calls = blocks(text, begin, end, read)
    return without(rest, STEP3.outer) if calls and begin not in rest else rest, calls


def minimax_m2(text: str, schemas: Schemas) -> Found:
    """Functions between MiniMax M2's tags."""
    rest, calls = tagged_functions(text, schemas, MINIMAX_M2)
    return without(rest, MINIMAX_M2.around) if calls and MINIMAX_M2.function not in rest else rest, calls


def _function(text: str, place: int, tags: Tags, schemas: Schemas) -> tuple[list[Call], int] | None:
    """The call whose name begins at `place`."""
    close = text.find(tags.close, place)
    name = text[place:close].strip() if close >= 0 else ""
    if not name or "\n" in name:
        return None
    types = types_of(schemas.get(name))
    arguments: JsonObject = {}
    place = skip_space(text, close + len(tags.close))
    while text.startswith(tags.argument, place):
        start = place + len(tags.argument)
        close = text.find(tags.close, start)
        stop = text.find(tags.argument_end, close)
        following = text.find("\n" + tags.argument, close, stop if stop >= 0 else len(text))
        if close < 0 or (stop < 0 and following < 0):
            return None
        ends_itself = following < 0  # models leave the end of an argument out where another follows
        value = text[close + len(tags.close) : stop if ends_itself else following]
        argument = text[start:close].strip()
        arguments[argument] = typed(value.removeprefix(tags.pad).removesuffix(tags.pad), types(argument))
        place = skip_space(text, stop + len(tags.argument_end) if ends_itself else following)
    if text.startswith(tags.function_end, place):
        return [(name, arguments)], place + len(tags.function_end)
    return ([(name, arguments)], place) if text.startswith(tags.around[1], place) else None


def _glm_call(text: str, place: int, end: str, schemas: Schemas) -> tuple[list[Call], int] | None:
    """A name, and <arg_key>name</arg_key><arg_value>a text</arg_value> for each argument."""
    stops = [at for tag in ("\n", "<") if (at := text.find(tag, place)) >= 0]
    name = text[place : min(stops, default=len(text))].strip()
    if not name or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        return None
    types = types_of(schemas.get(name))
    arguments: JsonObject = {}
    place = skip_space(text, min(stops, default=len(text)))
    while text.startswith("<arg_key>", place):
        close = text.find("</arg_key>", place)
        start = skip_space(text, close + len("</arg_key>")) if close >= 0 else place
        stop = text.find("</arg_value>", start)
        if close < 0 or stop < 0 or not text.startswith("<arg_value>", start):
            return None
        argument = text[place + len("<arg_key>") : close].strip()
        arguments[argument] = typed(text[start + len("<arg_value>") : stop], types(argument))
        place = skip_space(text, stop + len("</arg_value>"))
    return ([(name, arguments)], place) if text.startswith(end, place) else None


def types_of(schema: JsonObject | None) -> Callable[[str], frozenset[str]]:
    """The types that a function's argument may have, by its name; none: they are not known."""
    root: JsonObject = schema or {}
    properties = root.get("properties")

    def types(name: str) -> frozenset[str]:
        found = properties.get(name) if isinstance(properties, Mapping) else None
        return frozenset(_types(found, root))

    return types


def _types(schema: object, root: JsonObject, depth: int = 0) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            yield from _types(branch, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        yield from _types(referred(schema["$ref"], root), root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        yield kinds
    elif isinstance(kinds, list):
        yield from (kind for kind in kinds if isinstance(kind, str))
    else:
        listed = schema.get("enum")
        values = listed if isinstance(listed, list) else []
        for value in [*values, *([schema["const"]] if "const" in schema else [])]:
            yield _OF_JSON.get(type(value), "string")


def referred(reference: str, root: JsonObject) -> object:
    found: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def typed(text: str, types: frozenset[str]) -> object:
    """The text as a value of one of these types; a text if it is none of them, or if only that is allowed.

    Where no types are known, what is JSON is taken for it.
    """
    if types == {"string"}:
        return text
    bare = text.strip()
    value = json_value(_PYTHON.get(bare, bare) if types else bare)
    kind = _OF_JSON[type(value)]
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    is_value = (value is not None or bare in ("null", "None")) and kind != "string"
    if isinstance(value, float) and not math.isfinite(value):  # no JSON, but Python reads it
        is_value = False
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if is_value and fits else text


def fitting(value: object, written: str, types: frozenset[str]) -> object:
    """A literal as a value of one of these types, where it is plain which is meant: 5 for "5", "5" for 5."""
    kind = _OF_JSON[type(value)]
    if not types or kind in types or (kind == "integer" and "number" in types):
        return value
    if isinstance(value, str):
        return typed(value, types)
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    return written if "string" in types and kind in ("integer", "number", "boolean") else value


# Python: `[weather(city="Paris"), rest()]`, as Llama 4, LFM2 and OLMo 3 do. A call is a name and keyword arguments that
# are literals, read here character by character; one with positional arguments, names or expressions is none, for it
# does not say what is meant by them.


# --- Calls as Python. ---

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
