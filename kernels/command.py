"""`python -m llm kernels`: compile the CPU kernels ahead of time, and show what is there."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import Any

from llm.errors import LLMError
from llm.kernels.cpu import build


def add_command(commands: Any) -> None:
    """Add `kernels` to the command line's subcommands."""
    command = commands.add_parser("kernels", help="compile the CPU kernels ahead of time")
    actions = command.add_subparsers(required=True, metavar="ACTION")
    action = actions.add_parser("build", help="compile for this processor, unless it is done already")
    action.set_defaults(run=_build)
    choices = tuple(build.TARGETS)
    action.add_argument("--target", choices=choices, action="append", help="instruction set (default: the best here)")
    action.add_argument("--force", action="store_true", help="compile again")


def _build(args: argparse.Namespace) -> int:
    for target in args.target or build.supported_targets()[-1:]:
        started = perf_counter()
        try:
            path = build.ensure_library(target, rebuild=args.force)
        except build.BuildError as error:
            raise LLMError(f"{error}.") from error
        print(f"{target}: {path} ({perf_counter() - started:.1f} s)", file=sys.stdout)
    return 0
