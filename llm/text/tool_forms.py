"""The forms in which models write tool calls: how a chat template that teaches one is known, read and written.

Written is a call that must happen: a format of `structural_tag` with the words of the form.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llm.base.types import JsonObject
from llm.text.tool_calls import (
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
    Found,
    Schemas,
    Tags,
    between,
    deepseek,
    json_between,
    kimi_k2,
    llama3_json,
    minimax_m2,
    mistral,
    pythonic,
    referred,
    step3,
    tool_call,
    types_of,
)

# Of a schema of arguments, what says nothing but which there are; of an argument, what a text of any kind fits.
_OF_OBJECTS = frozenset("type properties required additionalProperties title description $defs definitions".split())
_OF_TEXTS = frozenset("type title description default examples anyOf oneOf enum const $ref".split())
_MOST_OPTIONAL = 16  # arguments; each may be the first
_DEEPEST = 16  # schemas inside each other
_DEFINITIONS = ("#/$defs/", "#/definitions/")


class CannotWrite(Exception):
    """Arguments of this schema cannot be written as texts between tags so that they must fit it."""


@dataclass(frozen=True)
class Writing:
    """How calls are written: `before`, the calls with `between` between them (None: there is one), `after`."""

    call: Callable[[str, JsonObject], JsonObject]
    before: str = ""
    between: str | None = "\n"
    after: str = ""

    def format(self, functions: Mapping[str, JsonObject], is_parallel: bool) -> JsonObject:
        """The format of a reply that calls at least one of the functions, and says nothing else."""
        tags = [self.call(name, schema) for name, schema in functions.items()]
        single = self.between is None or not is_parallel
        several = {"type": "tags_with_separator", "tags": tags, "separator": self.between or "", "at_least_one": True}
        elements = [_text(self.before), {**several, "stop_after_first": single}, _text(self.after)]
        return {"type": "sequence", "elements": [element for element in elements if element.get("value") != ""]}


@dataclass(frozen=True)
class Form:
    """A form.

    Attributes:
        marks: a template that teaches it has all texts of one of these.
        begins: what a call may begin with; for the warning about one that was not read.
        read: the calls of a reply; the schemas say which types arguments have.
        write: for a template, how calls are written.
        writes_python: arguments are Python's literals.
    """

    marks: tuple[tuple[str, ...], ...]
    begins: tuple[str, ...]
    read: Callable[[str, Schemas], Found]
    write: Callable[[str], Writing]
    writes_python: bool = False


def _text(value: str) -> JsonObject:
    return {"type": "const_string", "value": value}


def _json_tag(before: str, after: str = "", key: str = "arguments") -> Callable[[str, JsonObject], JsonObject]:
    """{"name": ..., "arguments": ...} between two texts."""

    def call(name: str, schema: JsonObject) -> JsonObject:
        begin = f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return _tag(begin, {"type": "json_schema", "json_schema": schema}, "}" + after)

    return call


def _arguments_tag(before: str, after: str) -> Callable[[str, JsonObject], JsonObject]:
    """The arguments alone, between two texts; the first has the name in the place of `{}`."""
    return lambda name, schema: _tag(before.replace("{}", name), {"type": "json_schema", "json_schema": schema}, after)


def _tag(begin: str, content: JsonObject, end: str) -> JsonObject:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _functions_tag(tags: Tags) -> Callable[[str, JsonObject], JsonObject]:
    """A function with its arguments as texts."""
    begin, end = tags.around
    line = tags.line

    def call(name: str, schema: JsonObject) -> JsonObject:
        head = f"{begin}{line}{tags.function}{_plain(name)}{tags.close}{line}"
        tail = f"{tags.function_end}{line}{end}"

        def argument(own: str) -> tuple[str, str]:
            return f"{tags.argument}{own}{tags.close}{tags.pad}", tags.argument_end + line

        return _tag(head, _arguments(schema, argument, tail, tags.pad), "")

    return call


def _glm_tag(line: str) -> Callable[[str, JsonObject], JsonObject]:
    def call(name: str, schema: JsonObject) -> JsonObject:
        def argument(own: str) -> tuple[str, str]:
            return f"<arg_key>{own}</arg_key>{line}<arg_value>", f"</arg_value>{line}"

        return _tag(f"<tool_call>{_plain(name)}{line}", _arguments(schema, argument, "</tool_call>", ""), "")

    return call


def _arguments(schema: JsonObject, argument: Callable[[str], tuple[str, str]], tail: str, pad: str) -> JsonObject:
    """The arguments in the schema's order, those that are not required or not, and `tail`.

    Args:
        argument: a name -> what stands before and after the value.
        pad: what comes between a value and what stands after it, and is not part of it.
    """
    if not schema.keys() <= _OF_OBJECTS:
        raise CannotWrite
    required = schema.get("required", [])
    elements = []
    for name, own in schema.get("properties", {}).items():
        before, after = argument(_plain(name))
        written = _argument(own, types_of(schema)(name), schema, before, after, pad)
        elements.append(written if name in required else {"type": "or", "elements": [written, _text("")]})
    if not set(required) <= schema.get("properties", {}).keys():
        raise CannotWrite
    return {"type": "sequence", "elements": [*elements, _text(tail)]}


def _argument(own: object, types: frozenset[str], schema: JsonObject, before: str, after: str, pad: str) -> JsonObject:
    values = own.get("enum", [own["const"]] if "const" in own else None) if isinstance(own, Mapping) else None
    if values is not None:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        choices = [_text(before + text + pad + after) for text in texts]
        return {"type": "or", "elements": choices}
    if types and "string" not in types and isinstance(own, Mapping):
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if any(not reference.startswith(_DEFINITIONS) for reference in _references(own)):
            raise CannotWrite
        return _tag(before, {"type": "json_schema", "json_schema": {**own, **definitions}}, pad + after)
    if any(not branch.keys() <= _OF_TEXTS or "enum" in branch or "const" in branch for branch in _branches(own)):
        raise CannotWrite
    # The value ends at the first of its end's words; a line before them is not part of it.
    end = after.removesuffix("\n")
    return {"type": "sequence", "elements": [_tag(before, {"type": "any_text"}, end), _text(after[len(end) :])]}


def _python_tag(name: str, schema: JsonObject) -> JsonObject:
    """name(argument=value, ...), the required arguments first."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= _OF_OBJECTS or not set(required) <= properties.keys() or not name.isidentifier():
        raise CannotWrite
    given = {own: _python_value(value, schema) for own, value in properties.items()}
    optional = [own for own in given if own not in required]
    if len(optional) > _MOST_OPTIONAL or not all(own.isidentifier() for own in given):
        raise CannotWrite

    def argument(own: str, before: str) -> JsonObject:
        return _tag(f"{before}{own}=", given[own], "")

    def more(names: Sequence[str]) -> list[JsonObject]:
        return [{"type": "or", "elements": [argument(own, ", "), _text("")]} for own in names]

    if required:
        first, *others = [own for own in given if own in required]
        elements = [argument(first, ""), *(argument(own, ", ") for own in others), *more(optional)]
        return _tag(f"{name}(", {"type": "sequence", "elements": elements}, ")")
    starts = [
        {"type": "sequence", "elements": [argument(own, ""), *more(optional[index + 1 :])]}
        for index, own in enumerate(optional)
    ]
    return _tag(f"{name}(", {"type": "or", "elements": [*starts, _text("")]}, ")")


def _python_value(own: object, root: JsonObject) -> JsonObject:
    """A value as Python writes it: as JSON, but for the constants."""
    if not isinstance(own, Mapping):
        raise CannotWrite
    values = own.get("enum", [own["const"]] if "const" in own else None)
    if values is not None:
        return {"type": "or", "elements": [_text(_literal(value)) for value in values]}
    branches = [branch for key in ("anyOf", "oneOf") for branch in own.get(key, [])]
    kinds = own.get("type")
    if isinstance(kinds, list):
        branches = [{**own, "type": kind} for kind in kinds]
    if branches:
        if not isinstance(kinds, list) and not own.keys() <= _OF_TEXTS:
            raise CannotWrite
        return {"type": "or", "elements": [_python_value(branch, root) for branch in branches]}
    if kinds in ("boolean", "null"):
        return {
            "type": "or",
            "elements": [_text(text) for text in (("True", "False") if kinds == "boolean" else ("None",))],
        }
    if any(not reference.startswith(_DEFINITIONS) for reference in _references(own)) or not _is_alike(own, root):
        raise CannotWrite
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {"type": "json_schema", "json_schema": {**own, **definitions}}


def _is_alike(schema: object, root: JsonObject, depth: int = 0) -> bool:
    """True if its values are written alike in Python and in JSON: they hold no true, false or null."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return False
    if "$ref" in schema:
        return _is_alike(referred(schema["$ref"], root), root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values)
    if schema.get("type") in ("string", "integer", "number"):
        return True
    if schema.get("type") == "array":
        return "prefixItems" not in schema and _is_alike(schema.get("items"), root, depth + 1)
    if schema.get("type") != "object" or schema.get("additionalProperties") is not False:
        return False
    inner = schema.get("properties", {}).values()
    return "patternProperties" not in schema and all(_is_alike(each, root, depth + 1) for each in inner)


def _literal(value: object) -> str:
    """JSON data as Python writes it."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(item)}" for name, item in value.items()) + "}"
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _plain(name: str) -> str:
    if any(letter in '<>"\n' for letter in name):
        raise CannotWrite
    return name


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from (value for key, value in schema.items() if key == "$ref" and isinstance(value, str))
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _branches(schema: object) -> Iterator[Mapping[str, object]]:
    """The schema and its alternatives; raises `CannotWrite` for a reference."""
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        raise CannotWrite
    yield schema
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key, []):
            yield from _branches(branch)


def _deepseek(template: str) -> Writing:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    calls = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
    if "```json" in template:
        return Writing(_arguments_tag(f"{begin}function{sep}{{}}\n```json\n", f"\n```{end}"), calls[0], "\n", calls[1])
    return Writing(_arguments_tag(f"{begin}{{}}{sep}", end), calls[0], "", calls[1])


def _mistral(template: str) -> Writing:
    if "[ARGS]" in template:
        return Writing(_arguments_tag("[TOOL_CALLS]{}[ARGS]", ""), between="")
    return Writing(_json_tag(""), "[TOOL_CALLS][", ", ", "]")


def _granite(template: str) -> Writing:
    return Writing(_json_tag(""), "<|tool_call|>[" if "<|tool_call|>" in template else "<tool_call>[", ", ", "]")


def _phi4(template: str) -> Writing:
    if "functools[" in template:
        return Writing(_json_tag(""), "functools[", ", ", "]")
    return Writing(_json_tag(""), "<|tool_call|>[", ", ", "]<|/tool_call|>")


def _always(writing: Writing) -> Callable[[str], Writing]:
    return lambda template: writing


def _of_json(*pairs: tuple[str, str]) -> Callable[[str, Schemas], Found]:
    read = json_between(*pairs)
    return lambda text, schemas: read(text)


def _llama3(text: str, schemas: Schemas) -> Found:
    """JSON; or Python, which Llama writes too, of functions that there are."""
    rest, calls = llama3_json(text)
    if calls:
        return rest, calls
    rest, calls = pythonic(text, schemas)
    return (rest, calls) if all(name in schemas for name, _ in calls) else (text, [])


# --- The forms. ---

_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_OLMO3 = ("<function_calls>", "</function_calls>")
_TOOL_CODE = ("```tool_code", "```")
_ACTION = ("<|action_start|><|plugin|>", "<|action_end|>")
_LONGCAT = ("<longcat_tool_call>", "</longcat_tool_call>")
_KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>"
_HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"

# The first whose marks a template has, so that <tool_call> alone comes after those that write something else in it.
# `gpt_oss` has its own reader, of whole replies.
FORMS: dict[str, Form] = {
    "gpt_oss": Form(
        (("<|channel|>", "<|message|>"),),
        ("to=functions.",),
        lambda text, schemas: (text, []),
        _always(Writing(_arguments_tag(_HARMONY, ""), between=None)),
    ),
    "step3": Form(
        (("<steptml:",), ("<｜tool_calls_begin｜>",)),  # noqa: RUF001
        ("<｜tool_call_begin｜>", "<steptml:invoke"),  # noqa: RUF001
        step3,
        _always(Writing(_functions_tag(STEP3), "<｜tool_calls_begin｜>", "<｜tool_sep｜>", "<｜tool_calls_end｜>")),  # noqa: RUF001
    ),
    "deepseek": Form(
        (("<｜tool▁call▁begin｜>",),),  # noqa: RUF001
        ("<｜tool▁call▁begin｜>",),  # noqa: RUF001
        lambda text, schemas: deepseek(text),
        _deepseek,
    ),
    "kimi_k2": Form(
        (("<|tool_call_argument_begin|>",),),
        ("<|tool_call_begin|>",),
        lambda text, schemas: kimi_k2(text),
        _always(
            Writing(
                *(_arguments_tag(_KIMI, "<|tool_call_end|>"), "<|tool_calls_section_begin|>"),
                *(None, "<|tool_calls_section_end|>"),
            )
        ),
    ),
    "mistral": Form((("[TOOL_CALLS]",),), ("[TOOL_CALLS]",), lambda text, schemas: mistral(text), _mistral),
    "minimax_m2": Form(
        (("<minimax:tool_call>",),),
        ("<minimax:tool_call>", '<invoke name="'),
        minimax_m2,
        _always(Writing(_functions_tag(MINIMAX_M2))),
    ),
    "seed_oss": Form(
        (("<seed:tool_call>",),),
        ("<seed:tool_call>", "<function="),
        lambda text, schemas: tool_call(text, schemas, SEED_OSS),
        _always(Writing(_functions_tag(SEED_OSS))),
    ),
    "longcat": Form(
        (("<longcat_tool_call>",),),
        ("<longcat_tool_call>",),
        _of_json(_LONGCAT),
        _always(Writing(_json_tag(_LONGCAT[0] + "\n", "\n" + _LONGCAT[1]))),
    ),
    "internlm": Form(
        (("<|action_start|>", "<|plugin|>"),),
        ("<|action_start|>",),
        _of_json(_ACTION),
        _always(Writing(_json_tag(_ACTION[0] + "\n", _ACTION[1]), between=None)),
    ),
    "granite_20b_fc": Form(
        (("<function_call>",),),
        ("<function_call>",),
        _of_json(("<function_call>", "")),
        _always(Writing(_json_tag("<function_call> "))),
    ),
    "phi4_mini_json": Form(
        (("functools[",), ("<|/tool|>",)),
        ("functools[", "functools {", "<|tool_call|>"),
        _of_json(("functools", ""), ("<|tool_call|>", "<|/tool_call|>")),
        _phi4,
    ),
    "granite": Form(
        (("<|tool_call|>",), ("<tool_call>[",)),
        ("<|tool_call|>", "<tool_call>"),
        _of_json(("<|tool_call|>", ""), ("<tool_call>", "</tool_call>")),
        _granite,
    ),
    "jamba": Form(
        (("<tool_calls>",),),
        ("<tool_calls>",),
        _of_json(("<tool_calls>", "</tool_calls>")),
        _always(Writing(_json_tag(""), "<tool_calls>[", ", ", "]</tool_calls>")),
    ),
    "nemotron_json": Form(
        (("<TOOLCALL>",),),
        ("<TOOLCALL>",),
        _of_json(("<TOOLCALL>", "</TOOLCALL>")),
        _always(Writing(_json_tag(""), "<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    ),
    "glm45": Form(
        (("<tool_call>", "<arg_key>"),),
        ("<tool_call>", "<arg_key>"),
        tool_call,
        lambda template: Writing(_glm_tag("" if "}<arg_key>" in template else "\n")),
    ),
    "qwen3_coder": Form(
        (("<tool_call>", "<function="),),
        ("<tool_call>", "<function="),
        tool_call,
        _always(Writing(_functions_tag(QWEN3_CODER))),
    ),
    "hermes": Form(
        (("<tool_call>",),),
        ("<tool_call>",),
        tool_call,
        _always(Writing(_json_tag("<tool_call>\n", "\n</tool_call>"))),
    ),
    "lfm2": Form(
        ((_LFM2[0],), ("<|tool_list_start|>",)),
        (_LFM2[0],),
        between(*_LFM2),
        _always(Writing(_python_tag, _LFM2[0] + "[", ", ", "]" + _LFM2[1])),
        writes_python=True,
    ),
    "olmo3": Form(
        ((_OLMO3[0],),),
        (_OLMO3[0],),
        between(*_OLMO3),
        _always(Writing(_python_tag, _OLMO3[0], "\n", _OLMO3[1])),
        writes_python=True,
    ),
    "gemma3": Form(
        ((_TOOL_CODE[0],),),
        (_TOOL_CODE[0],),
        between(*_TOOL_CODE),
        _always(Writing(_python_tag, _TOOL_CODE[0] + "\n", "\n", "\n" + _TOOL_CODE[1])),
        writes_python=True,
    ),
    "pythonic": Form(
        (("func_name1(",),),
        ("<|python_start|>",),
        pythonic,
        _always(Writing(_python_tag, "[", ", ", "]")),
        writes_python=True,
    ),
    "llama3_json": Form(
        (("<|python_tag|>",), ('"parameters":',)),
        ("<|python_tag|>", '{"name"', '"parameters":'),
        _llama3,
        _always(Writing(_json_tag("", key="parameters"), between=None)),
    ),
}
# vLLM's other names of the same forms.
ALIASES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), "deepseek"),
    **dict.fromkeys(("llama4_json",), "llama3_json"),
    **dict.fromkeys(("glm47", "glm4_moe"), "glm45"),
    **dict.fromkeys(("qwen3_xml", "step3p5"), "qwen3_coder"),
    **dict.fromkeys(("ernie45", "granite4"), "hermes"),
    "granite-20b-fc": "granite_20b_fc",
    "hunyuan_a13b": "jamba",
    "openai": "gpt_oss",
    "llama4_pythonic": "pythonic",
}


@functools.lru_cache(maxsize=64)
def form_of(template: str) -> str | None:
    """The form of tool calls that a template teaches; None: it is not known here."""
    return next(
        (name for name, form in FORMS.items() if any(all(mark in template for mark in marks) for marks in form.marks)),
        None,
    )


def begins_of_calls(functions: Iterable[str]) -> Sequence[str]:
    """What calls begin with, in any form that is known, of these functions."""
    return sorted({begin for form in FORMS.values() for begin in form.begins} | {f"[{name}(" for name in functions})
