"""`python -m llm kernels`: compile the CPU kernels ahead of time, or measure them.

Apart from `bench.py`, which imports PyTorch: help of the command line does not.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter
from typing import Any

from llm.errors import LLMError
from llm.kernels.cpu import build


def add_command(commands: Any) -> None:
    """Add `kernels` to the command line's subcommands."""
    command = commands.add_parser("kernels", help="compile the CPU kernels ahead of time, or measure them")
    actions = command.add_subparsers(required=True, metavar="ACTION")
    action = actions.add_parser("build", help="compile for this processor, unless it is done already")
    action.set_defaults(run=_build)
    choices = tuple(build.machine_targets())
    which = "instruction set (default: LLM_CPU_ISA, or the best here)"
    action.add_argument("--target", choices=choices, action="append", help=which)
    action.add_argument("--force", action="store_true", help="compile again")
    action = actions.add_parser("bench", help="rates of the GEMMs beside PyTorch's, and the time of one call")
    action.set_defaults(run=_bench)
    action.add_argument("--seconds", type=float, default=0.3, help="for each entry (default: %(default)s)")


def _bench(args: argparse.Namespace) -> int:
    from llm.kernels.bench import run
    from llm.kernels.select import backend_for
    from llm.platforms import select_platform

    for line in run(backend_for(select_platform("cpu")[0]), args.seconds):
        print(line, flush=True)
    return 0


def _build(args: argparse.Namespace) -> int:
    from llm.kernels.cpu.library import choose_target, requested_isa

    isa = None if args.target else requested_isa()
    best, _ = choose_target(None if isa == "none" else isa)
    for target in args.target or [best]:
        started = perf_counter()
        try:
            path = build.ensure_library(target, rebuild=args.force)
        except build.BuildError as error:
            raise LLMError(f"{error}.") from error
        print(f"{target}: {path} ({perf_counter() - started:.1f} s)", file=sys.stdout)
    return 0
