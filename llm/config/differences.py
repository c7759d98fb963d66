"""The differences from vLLM as Markdown: the tables of docs/reference/differences.md.

`python -m llm.config.differences` prints them. Owns the form. The content is in `llm.config.arguments` and in the
docstring of `llm.sampling_params`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from llm import sampling_params
from llm.config.arguments import ARGUMENTS, DIFFERENT
from llm.sampling_params import SamplingParams

_NAMES = {*ARGUMENTS, *(item.name for item in fields(SamplingParams))}


def differences() -> str:
    """The tables, each under a heading that says what it lists."""
    tables = {
        "`SamplingParams`, where it is different or has more": _table(
            "field", "here", _described("Different from vLLM, on purpose", "Beyond vLLM")
        ),
        "Arguments of `LLM` with another default or a wider meaning": _table("argument", "here", DIFFERENT.items()),
        "Refused, except at the values that ask for nothing": _table(
            "argument", "why, and what to do instead", _by_note("refused")
        ),
        "Taken, and without an effect of its own on any answer": _table("argument", "why", _by_note("accepted")),
    }
    return "\n\n".join("\n".join([f"## {title}", "", *lines]) for title, lines in tables.items())


def _described(*titles: str) -> list[tuple[str, str]]:
    """(what, here) of the lists under these titles of the docstring; a further indented line continues the entry."""
    found: list[tuple[str, str]] = []
    for title in titles:
        section = (sampling_params.__doc__ or "").split(f"    {title}\n", 1)[1].split("\n\n", 1)[0]
        for line in section.splitlines():
            what, _, here = line.strip().partition("  ")
            if line.startswith("     "):
                found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
            else:
                found.append((what, here.strip()))
    return found


def _by_note(status: str) -> list[tuple[str, str]]:
    """(names, note), one for each note."""
    names: dict[str, list[str]] = {}
    for name, argument in ARGUMENTS.items():
        if argument.status == status:
            names.setdefault(argument.note, []).append(name)
    return [(", ".join(same), note) for note, same in names.items()]


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| {left} | {right} |", "|---|---|"]
    return lines + [f"| {_code(what)} | {here} |" for what, here in rows]


def _code(names: str) -> str:
    """The names of arguments and fields as code."""
    return re.sub(r"\w+", lambda word: f"`{word[0]}`" if word[0] in _NAMES else word[0], names)


if __name__ == "__main__":
    print(differences())
