"""One run of the benchmark, in order: calibrate, open the model, warm up, repeat the workloads, profile.

Memory is sampled from the first tensor on. Contestants alternate within a repetition. The profiled run is an additional
one that enters no figure: a table of time per operation, and of the time outside of operations. Every row is exclusive
time, so the rows add up to the wall time, whether PyTorch, a kernel of this package or a plugin computes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from llm.base.types import JsonObject
from llm.config.engine import DTYPES, EngineConfig
from llm.engine.boundary import ModelCost, ProfileRow, Rates
from llm.engine.engine import Engine
from llm.engine.scheduler import Scheduler
from llm.engine.step import SchedulerOutput
from llm.llm import EMBEDDED_MODEL, LLM
from llm.loading.resolve import resolve_folder
from llm.runner.profile import ENGINE, Recorder, replaced
from llm.tools.bench.machine import Calibration, busy_warning, calibrate, calibrate_for
from llm.tools.bench.measure import (
    Agreement,
    Contestant,
    Figure,
    Ours,
    PeakMemory,
    Run,
    Transformers,
    agreement,
    engine_figures,
    private_bytes,
    run_workload,
    speed_figures,
)
from llm.tools.bench.workloads import WEIGHT_DTYPES, BenchOptions, find_recipe, make_workload, write_config

Say = Callable[[str], None]

_PROFILE_REP = 1000  # its tokens are not in the prefix cache from a timed run


@dataclass
class WorkloadResult:
    """Runs and figures by contestant name; this engine is "llm"."""

    runs: dict[str, list[Run]]
    speed: dict[str, dict[str, Figure]]
    engine: dict[str, Figure]
    agreement: Agreement | None = None
    profile: Profile | None = None


@dataclass
class BenchResult:
    """All measurements.

    Attributes:
        imports: seconds by module; empty if they had been imported before.
        startup: seconds by phase of building the engine.
        first_tokens_seconds: a prompt of 8 tokens and 2 new tokens, right after start-up.
        memory_before: private bytes before the model is built; None: unknown.
        peak_memory: peak private bytes by phase, "load" or a workload. Empty if unknown, and with a rival, whose memory
            is in the same process.
    """

    options: BenchOptions
    calibration: Calibration | None
    imports: dict[str, float]
    startup: dict[str, float]
    first_tokens_seconds: float
    config: EngineConfig
    cost: ModelCost
    memory_before: int | None
    peak_memory: dict[str, int] = field(default_factory=dict)
    workloads: dict[str, WorkloadResult] = field(default_factory=dict)

    @property
    def rates(self) -> Rates | None:
        return self.calibration.rates if self.calibration else None

    @property
    def warnings(self) -> list[str]:
        found = self.calibration.warnings() if self.calibration else []
        for name, result in self.workloads.items():
            busy = [run.other_cores or 0.0 for runs in result.runs.values() for run in runs]
            found += busy_warning(f"running {name}", max(busy))
        return found


class Progress:
    """Prints lines on stderr with the seconds since the start."""

    def __init__(self) -> None:
        self._started = perf_counter()

    def __call__(self, line: str) -> None:
        print(f"[{perf_counter() - self._started:6.1f} s] {line}", file=sys.stderr, flush=True)


def run_session(options: BenchOptions, imports: dict[str, float], say: Say) -> BenchResult:
    """Run the benchmark; `say` gets a line when something long begins or ends."""
    memory_before = private_bytes()
    with ExitStack() as stack:
        stack.enter_context(_computing_with(options.threads))
        calibration = _calibrate(options, say)
        memory = stack.enter_context(PeakMemory())
        llm, rival = _open(options, say)
        stack.enter_context(llm)
        cost = llm._open_engine().runner.cost()
        first_tokens = _first_tokens(Ours(llm), rival)
        result = BenchResult(
            options, calibration, imports, dict(llm.startup), first_tokens, llm.config, cost, memory_before
        )
        _note_peak(result, "load", memory)
        if calibration is not None:
            result.calibration = calibrate_for(calibration, cost, options.calibrate_seconds / 4)
            memory.take()
        for name in options.workloads:
            result.workloads[name] = _measure(name, llm, rival, result, say)
            _note_peak(result, name, memory)
            if options.profile:
                result.workloads[name].profile = _profile(name, llm, say)
                memory.take()
    return result


def _calibrate(options: BenchOptions, say: Say) -> Calibration | None:
    if not options.calibrate_seconds:
        return None
    say("calibrating: read bandwidth and GEMM rate")
    return calibrate(options.calibrate_seconds)


def _open(options: BenchOptions, say: Say) -> tuple[LLM, Transformers | None]:
    """Build the rival, if any, then the engine, both with the same weights."""
    longest = max(find_recipe(name).longest for name in (*options.workloads, "tiny"))
    # The answers of made-up prompts repeat themselves: drafts would say nothing of other text.
    arguments: JsonObject = {"max_model_len": longest, "use_tqdm_on_load": False, "speculative_config": None}
    if options.against is not None:
        # A bfloat16 KV cache would round values that the rival keeps in float32.
        arguments["kv_cache_dtype"] = "float32"
    if options.shape is not None:
        return _open_shape(options, arguments | options.engine, say)
    say(f"loading {options.model or 'the embedded model'}")
    rival = None
    if options.against is not None:
        rival = Transformers.load(resolve_folder(options.model or EMBEDDED_MODEL, options.engine.get("revision")))
    return LLM(**{"model": options.model or EMBEDDED_MODEL, **arguments, **options.engine}), rival


def _open_shape(options: BenchOptions, arguments: JsonObject, say: Say) -> tuple[LLM, Transformers | None]:
    """Random weights: made in place or, with a rival, written to a temporary folder that both load."""
    with building_shape(options, say) as (folder, weight_dtype):
        arguments = {"model": folder, "skip_tokenizer_init": True, **arguments}
        if options.against is None:
            return LLM(**{"load_format": "dummy", **arguments}), None
        rival = Transformers.from_config(folder, DTYPES[weight_dtype])
        return LLM(**arguments), rival


@contextmanager
def building_shape(options: BenchOptions, say: Say) -> Iterator[tuple[Path, str]]:
    """(temporary folder with the shape's config.json, type of its weights)."""
    weight_dtype = options.weight_dtype or WEIGHT_DTYPES[0]
    say(f"building {options.shape} with random {weight_dtype} weights")
    with tempfile.TemporaryDirectory(prefix="llm-bench-") as name:
        write_config(str(options.shape), weight_dtype, Path(name))
        yield Path(name), weight_dtype


def _first_tokens(ours: Ours, rival: Transformers | None) -> float:
    """Seconds of our first tokens; the rival gets its own warm-up."""
    workload = make_workload("tiny", 0, ours.vocab_size)
    if rival is not None:
        rival.generate(workload.prompts, workload.recipe.max_tokens)
    started = perf_counter()
    ours.generate(workload.prompts, workload.recipe.max_tokens)
    return perf_counter() - started


def _measure(name: str, llm: LLM, rival: Transformers | None, so_far: BenchResult, say: Say) -> WorkloadResult:
    contestants: list[Contestant] = [Ours(llm), *([] if rival is None else [rival])]
    runs = _alternate(contestants, name, so_far.options.reps, llm.config.model_config.vocab_size, say)
    speed = {who: speed_figures(its_runs, so_far.cost, so_far.rates) for who, its_runs in runs.items()}
    result = WorkloadResult(runs, speed, engine_figures(runs[Ours.name]))
    if rival is not None:
        outputs = [[run.outputs for run in runs[who]] for who in (Ours.name, rival.name)]
        result.agreement = agreement(*outputs)
    return result


def _alternate(
    contestants: Sequence[Contestant], name: str, reps: int, vocab_size: int, say: Say
) -> dict[str, list[Run]]:
    """Each repetition runs all contestants, in alternating order, so that slow drifts affect them alike."""
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for rep in range(reps):
        for contestant in contestants[:: 1 if rep % 2 == 0 else -1]:
            run = run_workload(contestant, name, rep, vocab_size)
            runs[contestant.name].append(run)
            say(f"{name} run {rep + 1} of {reps}, {contestant.name}: {run.seconds:.2f} s")
    return runs


def _profile(name: str, llm: LLM, say: Say) -> Profile:
    say(f"{name} profiled")
    ours = Ours(llm)
    workload = make_workload(name, _PROFILE_REP, ours.vocab_size)
    return profile(llm._open_engine(), lambda: ours.generate(workload.prompts, workload.recipe.max_tokens))


def _note_peak(result: BenchResult, phase: str, memory: PeakMemory) -> None:
    peak = memory.take()
    if peak is not None and result.options.against is None:
        result.peak_memory[phase] = peak


@contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        stack.enter_context(replaced(scheduler, "schedule", _beginning_steps(scheduler, recorder)))
        for target, attribute, name in (
            (scheduler, "schedule", "scheduler"),
            (engine.runner, "execute", _RUNNER),
            (engine, "step", "rest of a step"),
        ):
            stack.enter_context(replaced(target, attribute, recorder.wrap(getattr(target, attribute), name, ENGINE)))
        yield


def _beginning_steps(scheduler: Scheduler, recorder: Recorder) -> Callable[[], SchedulerOutput]:
    """`Scheduler.schedule`, which begins a step."""
    schedule = scheduler.schedule

    def begun() -> SchedulerOutput:
        plan = schedule()
        recorder.begin_step(plan)
        return plan

    return begun
