"""What is measured: the options of a run, and workloads of token ids that are the same for every engine and machine.

Ids change with `rep`, so that no run hits the prefix cache of another;
lengths do not. The ids of a name and rep must not change: other engines were measured with them.

No PyTorch is imported here: the command measures how long that takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from llm.base.types import JsonObject
from llm.errors import ValidationError, nearest
from llm.tools.bench.shapes import find_shape

# A stream's prefill is timed with the ids of repetition rep + PREFILL_REPS, so rep must be below it.
PREFILL_REPS = 100

_LOWEST_ID = 3  # most vocabularies have their special tokens below
_VOCABULARY = 8000


@dataclass(frozen=True)
class Recipe:
    """The recipe of a workload.

    Attributes:
        rows: number of prompts.
        lengths: shortest and longest prompt, without the shared prefix.
        max_tokens: tokens generated per prompt.
        shared_prefix: length of the prefix that all prompts share, in tokens.
        is_stream: judged by prefill time and time per step; else by throughput.
    """

    about: str
    rows: int
    lengths: tuple[int, int]
    max_tokens: int
    shared_prefix: int = 0
    is_stream: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.shared_prefix + self.lengths[1] + self.max_tokens


RECIPES: dict[str, Recipe] = {
    "w1": Recipe("one stream: a prompt of 128, 128 new", 1, (128, 128), 128, is_stream=True),
    "w2": Recipe("a batch: 32 prompts of 32 to 256, 64 new", 32, (32, 256), 64),
    "w3": Recipe("a shared prefix: 32 prompts of 512 shared and 32 own, 16 new", 32, (32, 32), 16, 512),
    "w4": Recipe("many rows: 256 prompts of 16 to 64, 64 new", 256, (16, 64), 64),
    "s1": Recipe("steps of 1 row: a prompt of 16, 65 new", 1, (16, 16), 65, is_stream=True),
    "s32": Recipe("steps of 32 rows: prompts of 16, 65 new", 32, (16, 16), 65, is_stream=True),
    "tiny": Recipe("a prompt of 8, 2 new", 1, (8, 8), 2, is_stream=True),
}


@dataclass(frozen=True)
class Workload:
    """The prompts of one run, as token ids."""

    name: str
    recipe: Recipe
    prompts: list[list[int]]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return len(self.prompts) * self.recipe.max_tokens


def make_workload(name: str, rep: int = 0, vocab_size: int = _VOCABULARY) -> Workload:
    """The prompts of repetition `rep`; ids are folded into a vocabulary smaller than 8000."""
    recipe = find_recipe(name)
    content = Random(f"{name.upper()}-{rep}")
    lengths = Random(f"len-{name.upper()}")
    shared = draw_tokens(content, recipe.shared_prefix)
    prompts = [shared + draw_tokens(content, lengths.randint(*recipe.lengths)) for _ in range(recipe.rows)]
    return Workload(name, recipe, [_fold(prompt, vocab_size) for prompt in prompts])


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValidationError(
            f"workload must be one of {', '.join(RECIPES)}, got {name!r}.{nearest(name, RECIPES)}",
            parameter="workload",
            value=name,
        )
    return RECIPES[name]


def draw_tokens(random: Random, count: int, vocab_size: int = _VOCABULARY) -> list[int]:
    """`count` ids of a vocabulary, without those that are special in most."""
    return [random.randrange(_LOWEST_ID, vocab_size) for _ in range(count)]


def _fold(tokens: list[int], vocab_size: int) -> list[int]:
    if vocab_size >= _VOCABULARY:
        return tokens
    return [_LOWEST_ID + (token - _LOWEST_ID) % max(1, vocab_size - _LOWEST_ID) for token in tokens]


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
