"""Where the time goes: a table of time per operation, and of everything that is none.

Owns the instruments: while a profile runs, the operations of one live engine are wrapped, and nothing is left behind.
Every row is exclusive time, so rows add up to the wall time by construction. An operation is a module without children
or a `CustomOp`; what is computed elsewhere inside the model shows as "between operations". A call costs about a
microsecond to watch. Times are of calls: on a device that computes asynchronously they would be of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import nn

from llm.bench.cost import stored_tensors
from llm.layers.custom_op import CustomOp
from llm.layers.logits import LogitsProcessor

OPERATION, MODEL, ENGINE = "operation", "model", "engine"
PREFILL, DECODE = "prefill", "decode"

_ABSENT = object()


@dataclass
class PhaseTime:
    """Of one row in one phase. A step is prefill when any of its rows computes more than one token."""

    calls: int = 0
    seconds: float = 0.0
    operations: int = 0
    bytes_read: int = 0


@dataclass
class ProfileRow:
    """`kind`: "operation", "model" (between operations) or "engine" (scheduler, batches, outputs)."""

    name: str
    kind: str
    prefill: PhaseTime
    decode: PhaseTime

    @property
    def seconds(self) -> float:
        return self.prefill.seconds + self.decode.seconds


@dataclass(frozen=True)
class Work:
    """What a call computes: operations per row of its input, and the stored bytes it reads."""

    operations_per_row: int
    bytes_read: int
    argument: int = 0  # which positional argument has the rows


@dataclass(frozen=True)
class Profile:
    """`rows` by falling time; their seconds sum to `seconds`."""

    seconds: float
    rows: list[ProfileRow]

    @property
    def engine_share(self) -> float:
        """Of everything that is not in the model or the sampler."""
        return sum(row.seconds for row in self.rows if row.kind == ENGINE) / self.seconds


def profile(engine: Any, work: Callable[[], object]) -> Profile:
    """Run `work`, which drives `engine`, and say where its time went."""
    recorder = _Recorder()
    with _instruments(engine, recorder):
        recorder.wrap(work, "outside of steps (checks, outputs)", ENGINE)()
    rows = sorted(recorder.rows.values(), key=lambda row: -row.seconds)
    return Profile(recorder.total_seconds, rows)


class _Recorder:
    """Exclusive time by row: a stack holds, for each call in progress, the time of the calls inside it."""

    def __init__(self) -> None:
        self.rows: dict[str, ProfileRow] = {}
        self.phase = PREFILL
        self._inside = [0.0]

    @property
    def total_seconds(self) -> float:
        return self._inside[0]

    def wrap(self, function: Callable[..., Any], name: str, kind: str, work: Work | None = None) -> Callable[..., Any]:
        row = self.rows.setdefault(name, ProfileRow(name, kind, PhaseTime(), PhaseTime()))
        inside = self._inside

        def timed(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = perf_counter() - started
                time = row.prefill if self.phase == PREFILL else row.decode
                time.calls += 1
                time.seconds += seconds - inside.pop()
                inside[-1] += seconds
                if work is not None:
                    _add_work(time, work, args)

        return timed

    def note_phase(self, schedule: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap `Scheduler.schedule`, which opens a step and whose plan tells the phase."""

        def noted() -> Any:
            plan = schedule()
            counts = plan.num_scheduled_tokens.values()
            self.phase = PREFILL if any(count > 1 for count in counts) else DECODE
            return plan

        return noted


def _add_work(time: PhaseTime, work: Work, args: tuple[Any, ...]) -> None:
    x = args[work.argument]
    time.operations += work.operations_per_row * (x.numel() // x.shape[-1])
    time.bytes_read += work.bytes_read


@contextmanager
def _instruments(engine: Any, recorder: _Recorder) -> Iterator[None]:
    """Everything of `engine` wrapped; taken off in reverse order."""
    runner, scheduler = engine.runner, engine.scheduler
    with ExitStack() as stack:
        stack.enter_context(_replaced(scheduler, "schedule", recorder.note_phase(scheduler.schedule)))
        for module in runner.model.modules():
            if isinstance(module, CustomOp) or not any(True for _ in module.children()):
                wrapped = recorder.wrap(module.forward, *_describe(module, runner.model))
                stack.enter_context(_replaced(module, "forward", wrapped))
        for target, attribute, name, kind in (
            (runner.model, "forward", "between operations", MODEL),
            (runner.model, "compute_logits", "between operations", MODEL),
            (runner, "sampler", "sampler", OPERATION),
            (scheduler, "schedule", "scheduler", ENGINE),
            (runner.batch, "update", "batch: rows in and out", ENGINE),
            (runner.batch, "build", "batch: input of a step", ENGINE),
            (runner.batch, "advance", "batch: sampled tokens", ENGINE),
            (runner, "execute", "runner", ENGINE),
            (engine, "step", "rest of a step (append, finish)", ENGINE),
        ):
            wrapped = recorder.wrap(getattr(target, attribute), name, kind)
            stack.enter_context(_replaced(target, attribute, wrapped))
        yield


@contextmanager
def _replaced(target: Any, attribute: str, value: Any) -> Iterator[None]:
    """An attribute of one instance, put back (or uncovered) at the end."""
    before = vars(target).get(attribute, _ABSENT)
    setattr(target, attribute, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(target, attribute)
        else:
            setattr(target, attribute, before)


def _describe(module: nn.Module, model: nn.Module) -> tuple[str, str, Work | None]:
    """A name that layers with the same role and shape share, the row's kind, and what a call computes."""
    described: Any = module
    if isinstance(module, LogitsProcessor):
        head: Any = getattr(model, "lm_head", None)
        if head is None:
            return "lm head", OPERATION, None
        name, sizes = "lm head", (head.hidden_size, head.vocab_size)
        return f"{name} {_arrow(sizes)}", OPERATION, _matrix_work(head, sizes, argument=1)
    kind = getattr(module, "quant_kind", "")
    if kind == "linear":
        role, sizes = described.prefix.rpartition(".")[2], (described.input_size, described.output_size)
        return f"linear {role} {_arrow(sizes)}", OPERATION, _matrix_work(module, sizes)
    name = module.name if isinstance(module, CustomOp) else kind
    return name or type(module).__name__, OPERATION, None


def _arrow(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} -> {sizes[1]}"


def _matrix_work(layer: nn.Module, sizes: tuple[int, int], argument: int = 0) -> Work:
    return Work(2 * sizes[0] * sizes[1], sum(tensor.nbytes for tensor in stored_tensors(layer)), argument)
