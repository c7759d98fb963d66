"""gpt-oss's form: messages with channels, of which "analysis" is reasoning and a recipient is a function.

Owns the form.
"""

from __future__ import annotations

from llm.base.types import JsonObject
from llm.replies.calls import json_object

_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def read_harmony(text: str) -> tuple[str, str | None, list[tuple[str, JsonObject]]]:
    """(content, reasoning or None, calls) of a reply that goes on after `<|start|>assistant`."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, JsonObject]] = []
    for message in text.split("<|start|>"):
        head, tag, body = message.partition("<|message|>")
        if not tag:
            content.append(head)
            continue
        for end in _ENDS:
            body = body.partition(end)[0]
        arguments = json_object(body) if "to=functions." in head else None
        name = head.partition("to=functions.")[2].partition("<|")[0].split()[:1]
        if arguments is not None and name:
            calls.append((name[0], arguments))
        elif head.partition("<|channel|>")[2].startswith("analysis") and "to=" not in head:
            reasoning.append(body)
        else:
            content.append(body)
    return "\n".join(filter(None, content)), "\n".join(reasoning) if reasoning else None, calls
