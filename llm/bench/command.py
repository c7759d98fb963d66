"""`python -m llm bench`: arguments in, a table or JSON out.

Owns the subcommand. PyTorch and the engine are imported when it runs, by a clock.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from time import perf_counter
from typing import Any

from llm.bench.options import add_arguments, read_options

_IMPORTS = ("torch", "llm.api")


def add_command(commands: Any) -> None:
    """Add `bench` to the command line's subcommands."""
    command = commands.add_parser(
        "bench", help="measure speed, start-up and memory, against what this machine can do", allow_abbrev=False
    )
    command.set_defaults(run=_bench)
    add_arguments(command)


def _bench(args: argparse.Namespace) -> int:
    options = read_options(args)
    imports = time_imports()
    from llm.bench.report import as_object
    from llm.bench.session import Progress, run_session
    from llm.bench.tables import as_text

    report = as_object(run_session(options, imports, Progress()))
    print(json.dumps(report, indent=2, allow_nan=False) if args.json else as_text(report))
    return 0


def time_imports() -> dict[str, float]:
    """Seconds to import PyTorch, then this engine; nothing of what is imported already."""
    seconds = {}
    for name in _IMPORTS:
        if name not in sys.modules:
            started = perf_counter()
            importlib.import_module(name)
            seconds[name] = perf_counter() - started
    return seconds
