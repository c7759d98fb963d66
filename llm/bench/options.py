"""The options of `python -m llm bench`, checked. Imports no PyTorch: the command measures how long that takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm.base.types import JsonObject
from llm.bench.shapes import find_shape
from llm.bench.workloads import PREFILL_REPS, find_recipe
from llm.errors import ValidationError

WEIGHT_DTYPES = ("float32", "bfloat16")
RIVALS = ("transformers",)


@dataclass(frozen=True)
class BenchOptions:
    """The command line's arguments; `add_command` documents each. `model` and `shape` None: the embedded model."""

    model: str | None = None
    shape: str | None = None
    weight_dtype: str | None = None
    workloads: tuple[str, ...] = ("w1", "w2")
    reps: int = 3
    threads: int | None = None
    calibrate_seconds: float = 2.0
    against: str | None = None
    profile: bool = False
    engine: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.workloads:
            find_recipe(name)
        if self.shape is not None:
            find_shape(self.shape)
            if self.model is not None:
                raise invalid("shape", self.shape, "left out when --model is given")
        elif self.weight_dtype is not None:
            right = "left out without --shape: a model's weights stay as stored"
            raise invalid("weight-dtype", self.weight_dtype, right)
        if self.weight_dtype not in (None, *WEIGHT_DTYPES):
            raise invalid("weight-dtype", self.weight_dtype, f"one of {', '.join(WEIGHT_DTYPES)}")
        if self.against not in (None, *RIVALS):
            raise invalid("against", self.against, f"one of {', '.join(RIVALS)}")
        if not 1 <= self.reps <= PREFILL_REPS:
            raise invalid("reps", self.reps, f"1 to {PREFILL_REPS}")
        if self.threads is not None and self.threads < 1:
            raise invalid("threads", self.threads, "at least 1")
        if not 0 <= self.calibrate_seconds < float("inf"):
            raise invalid("calibrate", self.calibrate_seconds, "a number of seconds, 0 for none")


def invalid(name: str, value: object, right: str) -> ValidationError:
    """The error for option `--name`, which must be `right`."""
    return ValidationError(f"--{name} must be {right}, got {value!r}.", parameter=name, value=value)
