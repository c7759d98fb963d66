"""`python -m llm chat`: a conversation in the terminal.

Answers are streamed to standard output, everything else goes to standard error, so that piped input gives piped output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from llm.base.command_line import add_engine_flags, engine_arguments
from llm.base.types import Commands, JsonObject
from llm.errors import LLMError, ValidationError

if TYPE_CHECKING:
    from llm.llm import LLM
    from llm.sampling_params import SamplingParams


_HELP = '''/system TEXT         what the model is told first; without TEXT: nothing
/reset               forget the conversation, keep what /system says
/params              show what answers are drawn with
/params NAME=VALUE   change it: /params temperature=0.2 max_tokens=100
/exit                end; so does Ctrl-D
""" begins a text of several lines, and """ at the end of a line ends it.
Ctrl-C stops an answer and keeps it; again, at the prompt, it ends.'''
_MAX_TOKENS = 1024
_QUOTES = '"""'


def add_command(commands: Commands) -> None:
    """Add `chat` to the command line's subcommands."""
    command = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description='Talk to a model. Piped input is answered line by line; what stands between two """ is one text.',
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_run)
    command.add_argument("model", nargs="?", help="model folder or hub name (default: the embedded model)")
    command.add_argument("--system", metavar="TEXT", default="", help="what the model is told first")
    command.add_argument("--temperature", metavar="T", type=float, help="0: always the likeliest token; up to 2")
    command.add_argument(
        "--max-tokens", metavar="N", type=int, help=f"most tokens of an answer (default: the model's, or {_MAX_TOKENS})"
    )
    add_engine_flags(command)


def _run(args: argparse.Namespace) -> int:
    from llm.llm import EMBEDDED_MODEL, LLM

    given = {"max_num_seqs": 1, "seed": None, **engine_arguments(args)}
    with LLM(EMBEDDED_MODEL if args.model is None else args.model, **given) as llm:
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):  # Windows; editing and history of the lines come from it
                importlib.import_module("readline")
            print(f"{llm!r}; /help lists the commands", file=sys.stderr)
        loop = ChatLoop(llm, args.system)
        given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        loop.change({name: value for name, value in given.items() if value is not None})
        loop.run(_from_terminal if is_terminal else lambda prompt: _from_pipe())
    return 0


class ChatLoop:
    """One conversation.

    Attributes:
        messages: of the conversation, without what /system says.
        params: what answers are drawn with.
    """

    def __init__(self, llm: LLM, system: str = "") -> None:
        self.llm = llm
        self.messages: list[dict[str, str]] = []
        self.params: SamplingParams = llm.get_default_sampling_params()
        if self.params.max_tokens is None:
            self.params = dataclasses.replace(self.params, max_tokens=_MAX_TOKENS)
        self._system = system

    def run(self, read: Callable[[str], str | None]) -> None:
        """Until `read` returns None, or /exit. Its lines are messages or commands; it is given what to ask with."""
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?" and the chat goes on
        while (line := read("> ")) is not None:
            text = line.strip()
            try:
                if text.startswith(_QUOTES):
                    self._answer_if_any(_several_lines(text, read))
                elif text.startswith("/"):
                    if self._obey(*text[1:].partition(" ")[::2]):
                        return
                else:
                    self._answer_if_any(text)
            except LLMError as error:
                print(f"error: {error}", file=sys.stderr)

    def _answer_if_any(self, text: str) -> None:
        if text.strip():
            self._answer(text.strip())

    def _obey(self, name: str, rest: str) -> bool:
        """Run a command; True if the chat ends."""
        commands: dict[str, Callable[[str], None]] = {
            "system": self._tell,
            "reset": lambda _: self.messages.clear(),
            "params": self._change,
            "help": lambda _: print(_HELP, file=sys.stderr),
        }
        if name in ("exit", "quit"):
            return True
        if name not in commands:
            known = ", ".join(f"/{each}" for each in (*commands, "exit"))
            raise ValidationError(f"/{name} is no command; there are {known}.", parameter="command", value=name)
        commands[name](rest.strip())
        return False

    def _tell(self, text: str) -> None:
        self._system = text
        when = "from the next answer on" if self.messages else "first"
        said = f"the model is told {when}: {text}" if text else "the model is told nothing first"
        print(said, file=sys.stderr)

    def change(self, given: JsonObject) -> None:
        """Draw answers with these fields of SamplingParams."""
        self.params = dataclasses.replace(self.params, **given)

    def _change(self, text: str) -> None:
        given = {}
        for item in text.split():
            name, equals, value = item.partition("=")
            if not equals:
                raise ValidationError(f"/params takes NAME=VALUE, got {item!r}.", parameter="params", value=item)
            try:
                given[name] = json.loads(value)
            except ValueError:  # not JSON, so text
                given[name] = value
        unknown = [name for name in given if name not in {item.name for item in dataclasses.fields(self.params)}]
        if unknown:
            raise ValidationError(f"SamplingParams has no {unknown[0]!r}.", parameter="params", value=unknown[0])
        self.change(given)
        print(self.params, file=sys.stderr)

    def _answer(self, text: str) -> None:
        """Stream the answer; Ctrl-C stops it, and what there is of it stays in the conversation."""
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self._system}] if self._system else []
        (prompt,) = self.llm.render_chat([*system, *self.messages, asked])
        pieces: list[str] = []
        try:
            for piece in self.llm.stream(prompt, self.params):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
        print(flush=True)
        self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]


def _several_lines(first: str, read: Callable[[str], str | None]) -> str:
    """The lines from one that begins with quotes to one that ends with them; all there are if none does."""
    lines = [first.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        line = read("... ")
        if line is None:
            return "\n".join(lines)
        lines.append(line.rstrip("\r\n"))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines)


def _from_terminal(prompt: str) -> str | None:
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


def _from_pipe() -> str | None:
    return (sys.stdin.readline() or None) if sys.stdin is not None else None
