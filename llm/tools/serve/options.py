"""What `vllm serve` takes that is no argument of `LLM` and no option here: taken where it asks for what is
here anyway, or refused with what to do instead. `python -m llm.tools.serve.options` prints the table of
docs/reference/differences.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from llm.base.text import show
from llm.base.types import JsonObject
from llm.errors import ValidationError


@dataclass(frozen=True)
class Option:
    """An option.

    Attributes:
        note: why it has no effect, or why it is refused and what to do instead.
        is_flag: it has no value, and `--no-` before its name asks for nothing.
        harmless: the values that are taken; None: all.
    """

    note: str
    is_flag: bool = True
    harmless: tuple[str, ...] | None = ()


def _taken(note: str, *names: str) -> dict[str, Option]:
    return {name: Option(note, harmless=None) for name in names}


def _refused(note: str, *names: str) -> dict[str, Option]:
    return {name: Option(note) for name in names}


def _valued(note: str, harmless: tuple[str, ...] | None, *names: str) -> dict[str, Option]:
    return {name: Option(note, False, harmless) for name in names}


OPTIONS: Mapping[str, Option] = {
    **_taken("requests and answers are not logged.", "disable-log-requests", "enable-log-deltas"),
    **_taken("there is no log of accesses.", "disable-uvicorn-access-log"),
    **_valued("there is no log of accesses.", None, "disable-access-log-for-endpoints", "uvicorn-log-level"),
    **_taken("there are no such pages.", "disable-fastapi-docs"),
    **_taken("one process serves.", "disable-frontend-multiprocessing"),
    **_valued("one process serves; leave it out.", ("1",), "api-server-count"),
    **_taken("calls are read wherever the template teaches them.", "enable-auto-tool-choice"),
    **_taken("the template is shown no tools then.", "exclude-tools-when-tool-choice-none"),
    **_taken("errors that are no client's are logged with their frames.", "log-error-stack"),
    **_taken("it changes no score.", "enable-flash-late-interaction"),
    **_valued("the template says which it reads; leave it out.", ("auto",), "chat-template-content-format"),
    **_valued("the role of an answer is the assistant's; leave it out.", ("assistant",), "response-role"),
    **_valued("answers have no fingerprint; leave it out.", ("none",), "fingerprint-mode", "fingerprint-value"),
    **_refused("every server answers; run one on each machine.", "headless"),
    **_valued("options are read from the command line alone; write them there.", (), "config"),
    **_refused("HTTP alone is spoken; leave it out.", "grpc"),
    **_refused("templates of requests are not run; pass --chat-template.", "trust-request-chat-template"),
    **_refused("answers have texts; /tokenize gives ids.", "return-tokens-as-token-ids"),
    **_valued("no code is loaded; name a form with --tool-call-parser.", (), "tool-parser-plugin"),
    **_valued("no tools are run here; run them in your own program.", (), "tool-server"),
    **_valued("no code is loaded; put a proxy before the server.", (), "middleware"),
    **_valued("--enable-log-requests logs bodies whole; leave it out.", (), "max-log-len"),
    **_refused("answers are not logged; leave it out.", "enable-log-outputs"),
    **_refused(
        "answers have no such numbers; /metrics has them.",
        *("enable-prompt-tokens-details", "enable-per-request-metrics", "enable-server-load-tracking"),
    ),
    **_refused("there is no /tokenizer_info; read the model's folder.", "enable-tokenizer-info-endpoint"),
    **_refused("answers have ids in their bodies; leave it out.", "enable-request-id-headers"),
    **_refused("there are no pages; docs/howto/serve.md lists the routes.", "enable-offline-docs"),
    **_refused("start the server again when its certificate has changed.", "enable-ssl-refresh"),
    **_refused("Cohere's protocol is not spoken; leave it out.", "cohere-is-reasoning-model"),
    **_valued("Cohere's protocol is not spoken; leave it out.", (), "cohere-format"),
    **_valued(
        "headers may have 65,536 bytes, and bodies --max-body-bytes.",
        (),
        *("h11-max-incomplete-event-size", "h11-max-header-count"),
    ),
    **_valued(
        "replicas are processes of this server; set --data-parallel-size.",
        (),
        *("data-parallel-supervisor-port", "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s"),
        "dp-supervisor-probe-failure-threshold",
    ),
}
_SHORT = {"api-server-count": "-asc"}


def add_options(command: argparse.ArgumentParser) -> None:
    """Add them, without showing them; `check_options` refuses."""
    for name, option in OPTIONS.items():
        spelled = [*([_SHORT[name]] if name in _SHORT else []), f"--{name}", f"--{name.replace('-', '_')}"]
        more: JsonObject = {"dest": _dest(name), "default": None, "help": argparse.SUPPRESS}
        if not option.is_flag:
            command.add_argument(*dict.fromkeys(spelled), **more)
            continue
        command.add_argument(*dict.fromkeys(spelled), **more, action="store_true")
        negated = dict.fromkeys(f"--no-{text[2:]}" for text in spelled if text.startswith("--"))
        command.add_argument(*negated, **more, action="store_false")


def check_options(args: argparse.Namespace) -> None:
    """Raises `ValidationError` for one that is refused."""
    for name, option in OPTIONS.items():
        value = getattr(args, _dest(name))
        if value is None or value is False or option.harmless is None or value in option.harmless:
            continue
        given = f"--{name}" if option.is_flag else f"--{name} {show(value)}"
        raise ValidationError(f"{given} is refused: {option.note}", parameter=name)


def _dest(name: str) -> str:
    return f"vllm.{name}"


def table() -> str:
    """The lines of the options' table, one for each note."""
    lines = ["| option | here |", "|---|---|"]
    notes: dict[str, list[str]] = {}
    for name, option in OPTIONS.items():
        kind = "taken" if option.harmless is None else "refused"
        but = f", but for {', '.join(option.harmless)}" if option.harmless else ""
        notes.setdefault(f"{kind}{but}: {option.note}", []).append(f"`--{name}`")
    return "\n".join([*lines, *(f"| {', '.join(names)} | {note} |" for note, names in notes.items())])


if __name__ == "__main__":
    print(table())
