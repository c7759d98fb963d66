"""Messages as OpenAI writes them, made what chat templates read.

Owns the form of an assistant's message with tool calls. Templates want arguments as an object, and a content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm.base.errors import ValidationError
from llm.base.types import JsonObject
from llm.replies.calls import ToolCall, json_object


def readable(conversation: Sequence[JsonObject]) -> list[JsonObject]:
    """Raises `ValidationError`: a content is None without tool calls, or a call has no function's name."""
    return [_readable(message) for message in conversation]


def _readable(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if not calls:
        if message.get("content", "") is None:
            raise ValidationError(
                f"the content of a message must be a text, got None in one of the role {message['role']!r} without "
                "tool_calls.",
                parameter="messages",
            )
        return {name: value for name, value in message.items() if name != "tool_calls" or value is not None}
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise ValidationError("tool_calls of a message must be a list of calls.", parameter="messages", value=calls)
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": [_call(item) for item in calls]}


def _call(given: object) -> JsonObject:
    call = given.to_dict() if isinstance(given, ToolCall) else given
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValidationError(
            "tool_calls of a message must be ToolCalls, or {'function': {'name': ..., 'arguments': ...}}.",
            parameter="messages",
        )
    arguments = json_object(function.get("arguments", {}))
    kept = function.get("arguments") if arguments is None else arguments
    return {**call, "function": {**function, "arguments": kept}}
