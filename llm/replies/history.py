"""Messages as OpenAI writes them, made what chat templates read.

Owns the form of an assistant's message with tool calls, and of tools that a template has no place for. Templates want
arguments as an object, and a content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from llm.base.types import JsonObject
from llm.errors import ValidationError
from llm.replies.calls import ToolCall, json_object
from llm.replies.choice import ToolChoice


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


def tools_as_text(tools: Sequence[JsonObject], choice: ToolChoice) -> str:
    """The tools of a reply that must call, for a model whose template shows none."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    if choice.kind == "named":
        asked = f"Answer with the arguments of a call of {choice.name}, as JSON, and nothing else."
    else:
        asked = 'Answer with a JSON list of calls, [{"name": ..., "parameters": {...}}], and nothing else.'
    return "\n".join(["You can call these functions:", *lines, asked])


def with_text(conversation: Sequence[JsonObject], text: str, role: str) -> list[JsonObject]:
    """The conversation with a text in its first message of the role: after a system message, before another's.

    Where the conversation does not begin with a system message, it gets one.
    """
    messages = list(conversation)
    if role == "system" and (not messages or messages[0].get("role") != "system"):
        return [{"role": "system", "content": text}, *messages]
    for place, message in enumerate(messages):
        if message.get("role") == role:
            content = message.get("content") or ""
            own: list[object] = content if isinstance(content, list) else [{"type": "text", "text": content}]
            part = {"type": "text", "text": text}
            parts = [*own, part] if role == "system" else [part, *own]
            texts = [item.get("text") for item in parts if isinstance(item, Mapping)]
            joined = "\n\n".join(item for item in texts if isinstance(item, str) and item)
            messages[place] = {**message, "content": parts if isinstance(content, list) else joined}
            break
    return messages
