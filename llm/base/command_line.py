"""vLLM's helpers for command-line scripts and their clean-up; re-exported by `llm.utils` and `llm.distributed`."""

from __future__ import annotations

import argparse
import gc
import re
import sys
import uuid
from collections.abc import Sequence


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(text) for text in given], namespace)


def _dashed(text: str) -> str:
    """A long option with dashes for underscores in its name; its value is unchanged."""
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Run the garbage collector. Nothing else is left to do: `LLM.close` or `del llm` has freed the memory."""
    gc.collect()


_PROCESSORS = ("--logits-processors", "--logits_processors")
_CLASS_PATH = re.compile(r"[\w.]+:[\w.]+")


def add_logits_processors(command: argparse.ArgumentParser) -> None:
    """`--logits-processors MODULE:CLASS ...`, and vLLM's spelling; see `one_by_one`."""
    right = "logits processors to load, one or several"
    command.add_argument(*_PROCESSORS, metavar="MODULE:CLASS", action="append", help=right)


def one_by_one(arguments: Sequence[str]) -> list[str]:
    """Several values of `--logits-processors` as one option each: a prompt behind them is none of them."""
    spread: list[str] = []
    option = ""
    for text in arguments:
        if option and spread[-1] != option and _CLASS_PATH.fullmatch(text):
            spread.append(option)
        elif option and spread[-1] != option:
            option = ""
        option = text if text in _PROCESSORS else option
        spread.append(text)
    return spread
