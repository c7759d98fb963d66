"""vLLM's helpers for command-line scripts and their clean-up; re-exported by `llm.utils` and `llm.distributed`."""

from __future__ import annotations

import argparse
import gc
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
