"""`python -m llm plan`: what a model would take, before any of its weights is read.

Owns the arguments and what is printed; `preview.py` has the plan.
"""

from __future__ import annotations

import argparse
import json

from llm.base.types import Commands

_DOES_NOT_FIT = 3
_ARGUMENTS = {
    "dtype": (str, "as LLM(dtype=)"),
    "quantization": (str, "w8a8, w4a16 and so on: quantize while loading"),
    "max_model_len": (int, "most tokens of prompt and output together"),
    "max_num_seqs": (int, "most requests computed in one step"),
    "kv_cache_dtype": (str, "float32, bfloat16, float16"),
    "kv_cache_memory_bytes": (int, "bytes of the KV cache"),
}


def add_command(commands: Commands) -> None:
    """Add `plan` to the command line's subcommands."""
    command = commands.add_parser(
        "plan",
        help="say what a model would take, before it is loaded",
        description="Show the memory that a model would take, how many sequences fit, and what would make it fit. No "
        f"weight is read. The exit status is {_DOES_NOT_FIT} if the model does not fit.",
    )
    command.set_defaults(run=_run)
    command.add_argument("model", nargs="?", help="model folder or hub name (default: the embedded model)")
    for name, (kind, text) in _ARGUMENTS.items():
        option = "--" + name.replace("_", "-")
        command.add_argument(option, metavar="N" if kind is int else "NAME", type=kind, help=text)
    command.add_argument("--calibrate", action="store_true", help="measure this machine for a second, and keep it")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")


def _run(args: argparse.Namespace) -> int:
    from llm.api import EMBEDDED_MODEL, LLM

    given = {name: getattr(args, name) for name in _ARGUMENTS if getattr(args, name) is not None}
    found = LLM.plan(EMBEDDED_MODEL if args.model is None else args.model, calibrate=args.calibrate, **given)
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0 if found.fits else _DOES_NOT_FIT
