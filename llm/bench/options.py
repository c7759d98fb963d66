"""What the user asked of a benchmark, checked.

Imports no PyTorch: the command line reads this before anything is loaded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from typing import Any

from llm.bench.shapes import SHAPES, WEIGHT_DTYPES, find_shape
from llm.bench.workloads import RECIPES, find_recipe
from llm.errors import ValidationError

RIVALS = ("transformers",)


@dataclass(frozen=True)
class BenchOptions:
    """The command line's arguments; `add_arguments` documents each. `model` and `shape` None: the embedded model."""

    model: str | None = None
    shape: str | None = None
    weight_dtype: str = "float32"
    workloads: tuple[str, ...] = ("w1", "w2")
    reps: int = 3
    threads: int | None = None
    calibrate_seconds: float = 2.0
    against: str | None = None
    profile: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.workloads:
            find_recipe(name)
        if self.shape is not None:
            find_shape(self.shape)
            if self.model is not None:
                raise _invalid("shape", self.shape, "left out when --model is given")
        elif self.weight_dtype != WEIGHT_DTYPES[0]:
            raise _invalid(
                "dtype-weights", self.weight_dtype, "left out without --shape: a model's weights stay as stored"
            )
        if self.reps < 1:
            raise _invalid("reps", self.reps, "at least 1")
        if self.threads is not None and self.threads < 1:
            raise _invalid("threads", self.threads, "at least 1")
        if self.calibrate_seconds < 0:
            raise _invalid("calibrate", self.calibrate_seconds, "a number of seconds, 0 for none")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare what `read_options` reads."""
    command.add_argument("--model", help="model folder or hub name (default: the embedded model)")
    command.add_argument("--shape", help=f"a published shape with random weights instead: {', '.join(SHAPES)}")
    command.add_argument(
        "--dtype-weights", choices=WEIGHT_DTYPES, default="float32", help="how a shape's weights are stored"
    )
    command.add_argument(
        "--workload",
        default="w1,w2",
        help="one or more, separated by commas (default: %(default)s): "
        + "; ".join(f"{name} = {recipe.about}" for name, recipe in RECIPES.items()),
    )
    command.add_argument("--reps", type=int, default=3, help="repetitions; medians are shown (default: %(default)s)")
    command.add_argument("--threads", type=int, help="threads to compute with (default: PyTorch's choice)")
    command.add_argument("--against", choices=RIVALS, help="alternate with this engine on the same weights")
    command.add_argument("--profile", action="store_true", help="one more run of each workload: time per operation")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    command.add_argument(
        "--calibrate",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="how long to measure each of the machine's two rates first; 0: not, and show no floors (default: 2)",
    )
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of LLM(...), its value as JSON or text, e.g. max_num_batched_tokens=512; may be repeated",
    )


def read_options(args: argparse.Namespace) -> BenchOptions:
    """Raises `ValidationError` for anything that cannot be measured."""
    return BenchOptions(
        model=args.model,
        shape=args.shape,
        weight_dtype=args.dtype_weights,
        workloads=tuple(dict.fromkeys(name.strip().lower() for name in args.workload.split(","))),
        reps=args.reps,
        threads=args.threads,
        calibrate_seconds=args.calibrate,
        against=args.against,
        profile=args.profile,
        engine=dict(map(_parse_option, args.option)),
    )


def _parse_option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise _invalid("option", text, "NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _invalid(name: str, value: Any, right: str) -> ValidationError:
    return ValidationError(f"--{name} must be {right}, got {value!r}.", parameter=name, value=value)
