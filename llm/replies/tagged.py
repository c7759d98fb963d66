"""Readers of tool calls whose arguments are JSON, behind a tag or between two: Hermes, Granite, Mistral, DeepSeek, ...

Owns those forms. Texts are searched for fixed strings, never by regular expressions, whose time a reply could drive up.
"""

from __future__ import annotations

from collections.abc import Callable

from llm.replies.calls import Call, Found, call_of, json_object, leading_json

# (text, place after the tag) -> the calls that stand there and where they end; None: there is none.
ReadAt = Callable[[str, int], tuple[list[Call], int] | None]

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
