"""A tool call as data, and reading one from JSON that a model wrote.

Owns `ToolCall`. Malformed calls are no error: whoever reads them leaves them in the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from llm.base.types import JsonObject

# (name, arguments).
Call = tuple[str, JsonObject]
# What of a text is no call, and the calls.
Found = tuple[str, list[Call]]
# The JSON schema of each function's arguments, by its name.
Schemas = Mapping[str, JsonObject]


@dataclass
class ToolCall:
    """A call of a function, which the caller may execute.

    Attributes:
        arguments: as the model wrote them; they are not checked against the function's schema.
        id: "call00000" and so on, by place in the reply.
    """

    name: str
    arguments: JsonObject
    id: str = ""

    def to_dict(self) -> JsonObject:
        """As OpenAI writes it, in an assistant's message."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


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
