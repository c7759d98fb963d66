"""Tool calls as JSON between tags or behind one: Hermes and Qwen, Llama 3, Mistral, DeepSeek.

Owns those forms. Texts are searched for fixed strings, never by regular expressions, whose time a reply could drive up.
"""

from __future__ import annotations

from collections.abc import Callable

from llm.base.types import JsonObject
from llm.replies.calls import Found, call_of, json_object, json_value, leading_json


def between(text: str, begin: str, end: str, read: Callable[[str], tuple[str, JsonObject] | None]) -> Found:
    """Read what stands between `begin` and `end`, or the end of the text; a block that is no call stays in the text."""
    rest, calls, start = [], [], 0
    while (found := text.find(begin, start)) >= 0:
        inner = found + len(begin)
        close = text.find(end, inner)
        stop, after = (len(text), len(text)) if close < 0 else (close, close + len(end))
        call = read(text[inner:stop])
        rest.append(text[start:found] if call is not None else text[start:after])
        calls += [] if call is None else [call]
        start = after
    return "".join([*rest, text[start:]]), calls


def hermes(text: str) -> Found:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    return between(text, "<tool_call>", "</tool_call>", lambda inner: call_of(json_value(inner.strip())))


def llama3_json(text: str) -> Found:
    """{"name": ..., "parameters": {...}}, several of them with ; between, and nothing else."""
    bare, calls, place = text.replace("<|python_tag|>", "").strip(), [], 0
    while place < len(bare):
        value = leading_json(bare, place)
        call = None if value is None else call_of(value[0], needs_arguments=True)
        if value is None or call is None:
            return text, []
        calls.append(call)
        place = value[1]
        while place < len(bare) and (bare[place] == ";" or bare[place].isspace()):
            place += 1
    return ("", calls) if calls else (text, [])


def mistral(text: str) -> Found:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, once for each call."""
    before, tag, _ = text.partition("[TOOL_CALLS]")
    if not tag:
        return text, []
    rest, calls = [before], []
    for part in text[len(before) + len(tag) :].split(tag):
        found, end = _mistral_calls(part)
        calls += found
        rest.append(part[end:] if found else tag + part)
    return "".join(rest), calls


def _mistral_calls(part: str) -> tuple[list[tuple[str, JsonObject]], int]:
    """The calls that a part begins with, and where they end."""
    if part.lstrip()[:1] == "[":
        value = leading_json(part, 0)
        if value is None or not isinstance(value[0], list):
            return [], 0
        calls = [call_of(item) for item in value[0]]
        return ([], 0) if None in calls else ([call for call in calls if call is not None], value[1])
    name, brace, _ = part.partition("{")
    value = leading_json(part, len(name)) if brace else None
    name = name.partition("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
    arguments = None if value is None else json_object(value[0])
    return ([], 0) if value is None or arguments is None or not name else ([(name, arguments)], value[1])


_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001


def deepseek(text: str) -> Found:
    """A name and its arguments, between DeepSeek's tokens; V3 and R1 put a kind before, and the JSON into a fence."""
    rest, calls = between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call)  # noqa: RUF001
    if calls and "<｜tool▁call▁begin｜>" not in rest:  # noqa: RUF001
        for tag in _CALLS:
            rest = rest.replace(tag, "")
    return rest, calls


def _deepseek_call(inner: str) -> tuple[str, JsonObject] | None:
    head, tag, tail = inner.partition("<｜tool▁sep｜>")  # noqa: RUF001
    name, fence, body = tail.partition("```json")
    if fence:
        tail = body.strip().removesuffix("```")
    arguments = json_object(tail.strip())
    name = (name if fence else head).strip()
    return None if not tag or arguments is None or not name else (name, arguments)
