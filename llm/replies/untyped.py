"""Readers of tool calls whose arguments are texts between tags: Qwen3-Coder, GLM, Seed-OSS, Step 3, MiniMax M2.

Owns those forms, and how a text becomes a value: by the function's schema. A call that was cut off is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from llm.base.types import JsonObject
from llm.replies.calls import Call, Found, Schemas, json_value
from llm.replies.tagged import blocks, json_calls, skip_space, without

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
