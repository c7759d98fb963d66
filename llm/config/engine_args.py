"""`EngineArgs` as scripts for vLLM use it: all arguments of `LLM` as one record, and as options of a command line.

    args = EngineArgs(model="path", max_model_len=512)
    LLM.from_engine_args(args), LLM(**vars(args)), LLM(**dataclasses.asdict(args))
    EngineArgs.add_cli_args(parser), EngineArgs.from_cli_args(parser.parse_args())

`llm.config.arguments` says how each argument is handled; `llm.config.engine.LLMArgs` has those with an effect, checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llm.base.checks import known_fields
from llm.base.suggestions import CONSTRUCTOR
from llm.config.arguments import ARGUMENTS
from llm.config.engine import EMBEDDED_MODEL, LLMArgs

Args = TypeVar("Args", bound="CommandLine")


@dataclass
class CommandLine:
    """The options of a command line; a base without fields."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each argument of `LLM`, `--max-model-len` for `max_model_len`; returns the parser."""
        group = parser.add_argument_group("arguments of LLM")
        for name, default in DEFAULTS.items():
            option = f"--{name.strip('_').replace('_', '-')}"
            note = (ARGUMENTS[name].note or "see LLM").replace("%", "%%")
            if name == "logits_processors":
                group.add_argument(option, dest=name, nargs="+", action="extend", help=note)
            elif isinstance(default, bool):
                group.add_argument(option, dest=name, action=argparse.BooleanOptionalAction, default=default, help=note)
            else:
                group.add_argument(
                    option, dest=name, nargs="?", const=True, default=default, type=_reader(name), help=note
                )
        return parser

    @classmethod
    def from_cli_args(cls: type[Args], args: argparse.Namespace) -> Args:
        """The record of the parsed options; the script's other options are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in DEFAULTS})


def _defaults() -> dict[str, object]:
    """Argument -> its neutral value."""
    known: dict[str, object] = {item.name: item.default for item in dataclasses.fields(LLMArgs)}
    known |= {"model": EMBEDDED_MODEL, "verbose": False}
    return {
        name: known[name] if argument.status == "honoured" else _harmless(argument.harmless)
        for name, argument in ARGUMENTS.items()
    }


def _harmless(values: tuple[object, ...]) -> object:
    """None if it is harmless or the argument has no harmless values, else the first harmless value."""
    return None if not values or None in values else values[0]


_TEXTS = frozenset(item.name for item in dataclasses.fields(LLMArgs) if "str" in str(item.type))


def _reader(name: str) -> Callable[[str], object]:
    """The parser of an option's text: a string, unless it is a JSON object or list."""

    def read(text: str) -> object:
        if name in _TEXTS and text[:1] not in ("{", "["):
            return text
        try:
            return json.loads(text)
        except ValueError:
            return text

    return read


DEFAULTS = _defaults()

if TYPE_CHECKING:

    class EngineArgs(CommandLine):
        def __init__(self, model: str | Path = ..., **given: object) -> None: ...

    class AsyncEngineArgs(EngineArgs): ...

else:
    EngineArgs = known_fields(CONSTRUCTOR)(
        dataclasses.make_dataclass(
            "EngineArgs",
            [(name, object, field(default=default)) for name, default in DEFAULTS.items()],
            bases=(CommandLine,),
            namespace={"__doc__": "The arguments of `LLM`; none of them is checked before an `LLM` is made of them."},
        )
    )
    AsyncEngineArgs = known_fields(CONSTRUCTOR)(
        dataclasses.make_dataclass(
            "AsyncEngineArgs",
            [("enable_log_requests", bool, field(default=False))],
            bases=(EngineArgs,),
            namespace={"__doc__": "`EngineArgs` for `AsyncLLM`; requests are not logged, whatever it says."},
        )
    )
    EngineArgs.__module__ = AsyncEngineArgs.__module__ = __name__
