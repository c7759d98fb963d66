"""A profile: a table of time per operation, and of the time outside of operations.

Owns the engine's part; the runner's is `llm.runner.profile`'s. Every table row is exclusive time, so the rows add up to
the wall time by construction, whether PyTorch, a kernel of this package or a plugin computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter

from llm.engine.boundary import ProfileRow
from llm.engine.engine import Engine
from llm.engine.scheduler import Scheduler
from llm.engine.step import SchedulerOutput
from llm.runner.profile import ENGINE, Recorder, replaced

_RUNNER = "runner"


@dataclass(frozen=True)
class Profile:
    """Table rows by decreasing time; their seconds sum to `seconds`, the wall time."""

    seconds: float
    rows: list[ProfileRow]

    @property
    def engine_share(self) -> float:
        """The share of time outside the model and the sampler."""
        return sum(row.seconds for row in self.rows if row.kind == ENGINE) / self.seconds


def profile(engine: Engine, work: Callable[[], object]) -> Profile:
    """Run `work`, which drives `engine`, and profile it."""
    recorder = Recorder()
    engine.runner.start_profile()
    try:
        with _instruments(engine, recorder):
            started = perf_counter()
            recorder.wrap(work, "outside of steps", ENGINE)()
            seconds = perf_counter() - started
    finally:
        inside = engine.runner.stop_profile()
    _take_from(recorder.rows[_RUNNER], inside)
    rows = [row for row in (*recorder.rows.values(), *inside) if row.prefill.calls or row.decode.calls]
    return Profile(seconds, sorted(rows, key=lambda row: -row.seconds))


def _take_from(table_row: ProfileRow, inside: list[ProfileRow]) -> None:
    """The time of the runner's calls that the runner's own table rows tell is not the runner's own."""
    for row in inside:
        table_row.prefill.seconds -= row.prefill.seconds
        table_row.decode.seconds -= row.decode.seconds


@contextmanager
def _instruments(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """Patch `engine`; the patches are removed in reverse order."""
    scheduler = engine.scheduler
    with ExitStack() as stack:
        stack.enter_context(replaced(scheduler, "schedule", _telling_the_phase(scheduler, recorder)))
        for target, attribute, name in (
            (scheduler, "schedule", "scheduler"),
            (engine.runner, "execute", _RUNNER),
            (engine, "step", "rest of a step"),
        ):
            stack.enter_context(replaced(target, attribute, recorder.wrap(getattr(target, attribute), name, ENGINE)))
        yield


def _telling_the_phase(scheduler: Scheduler, recorder: Recorder) -> Callable[[], SchedulerOutput]:
    """`Scheduler.schedule`, which begins a step."""
    schedule = scheduler.schedule

    def told() -> SchedulerOutput:
        plan = schedule()
        recorder.begin_step(plan)
        return plan

    return told
