"""The measurements as one JSON object, which `--json` prints and `as_text` renders as tables.

The schema is of version 1. Times are seconds where a key ends in `_s`, sizes bytes where it ends in `_bytes`.

    schema, version, torch, transformers
    options             as given
    machine             device_name, cores, threads, read and gemm {best, spread, repeats}, other_cores, near and
                        integer (as read and gemm, of this model; null: as those); null if skipped
    model               name, model_type, architecture, dtype, quantization, weight_dtype, kv_cache_dtype,
                        max_model_len, parameters, linear_weights, head_weights, bytes_per_step, weight_bytes
    startup             imports_s {module: seconds}, phases_s {phase: seconds}, first_tokens_s, total_s, load_floor_s
    memory              private memory (RssAnon) in bytes: imports, weights, peaks {phase: bytes}; null where unknown
    workloads           name -> about, prompts, prompt_tokens, output_tokens, reps, prefill and decode {operations,
                        bytes_read, floor_s, bound: "bytes" or "operations"}, figures, engine, other_cores, against
                        (null, or name, about, figures, advantage {figure: ratio of medians, above 1 where this engine
                        is better}, agreement), profile (null, or seconds, engine_share, rows; a table row's prefill and
                        decode have calls and seconds beside the above)
    warnings            sentences

A figure is {unit, median, best, worst, floor, share}: `floor` is the best the machine allows, `share` how close the
median is to it (1: equal); both are null without calibration. A floor is max(operations / GEMM rate,
bytes read / read bandwidth), see `measure.py`; of loading, the bytes of the weights / read bandwidth.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from textwrap import wrap

import torch

from llm import __version__
from llm.base.types import JsonObject
from llm.base.types import JsonObject as Report
from llm.engine.boundary import Phase, PhaseTime, Rates
from llm.tools.bench.measure import Figure, Ours, Transformers, advantage, decode_cost, prefill_cost
from llm.tools.bench.session import BenchResult, Profile, WorkloadResult

SCHEMA = 1


def as_object(result: BenchResult) -> JsonObject:
    """The object `--json` prints; the module's docstring has its keys."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "options": dataclasses.asdict(result.options),
        "machine": None if result.calibration is None else dataclasses.asdict(result.calibration),
        "model": _model(result),
        "startup": {
            "imports_s": result.imports,
            "phases_s": result.startup,
            "first_tokens_s": result.first_tokens_seconds,
            "total_s": sum(result.imports.values()) + sum(result.startup.values()) + result.first_tokens_seconds,
            "load_floor_s": None
            if result.calibration is None
            else result.cost.weight_bytes / result.calibration.read.best,
        },
        "memory": _memory(result),
        "workloads": {name: _workload(result, item) for name, item in result.workloads.items()},
        "warnings": result.warnings,
    }


def _model(result: BenchResult) -> JsonObject:
    config, cost = result.config.model_config, result.cost
    return {
        "name": result.options.shape or result.options.model or "embedded",
        "model_type": config.model_type,
        "architecture": config.architecture,
        "dtype": _dtype(config.dtype),
        "quantization": config.quantization,
        "weight_dtype": _dtype(config.weight_dtype),
        "kv_cache_dtype": _dtype(result.config.cache_config.kv_cache_dtype),
        "max_model_len": config.max_model_len,
        "parameters": cost.parameters,
        "linear_weights": cost.linear_weights,
        "head_weights": cost.head_weights,
        "bytes_per_step": cost.bytes_per_step,
        "weight_bytes": cost.weight_bytes,
    }


def _memory(result: BenchResult) -> JsonObject | None:
    if not result.peak_memory:
        return None
    return {"imports": result.memory_before, "weights": result.cost.weight_bytes, "peaks": result.peak_memory}


def _workload(result: BenchResult, item: WorkloadResult) -> JsonObject:
    runs = item.runs[Ours.name]
    workload = runs[0].workload
    return {
        "about": workload.recipe.about,
        "prompts": len(workload.prompts),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "reps": len(runs),
        "prefill": _phase(prefill_cost(result.cost, workload), result.rates),
        "decode": _phase(decode_cost(result.cost, workload), result.rates),
        "figures": _figures(item.speed[Ours.name]),
        "engine": _figures(item.engine),
        "other_cores": [run.other_cores for run in runs],
        "against": _against(item, result.options.against, result.config.model_config.quantization),
        "profile": None if item.profile is None else _profile(item.profile, result.rates),
    }


def _against(item: WorkloadResult, rival: str | None, quantization: str | None) -> JsonObject | None:
    if rival is None or item.agreement is None:
        return None
    ours, theirs = item.speed[Ours.name], item.speed[rival]
    return {
        "name": rival,
        "about": Transformers.describe(quantization),
        "figures": _figures(theirs),
        "advantage": {name: advantage(figure, theirs[name]) for name, figure in ours.items()},
        "agreement": dataclasses.asdict(item.agreement),
    }


def _profile(profile: Profile, rates: Rates | None) -> JsonObject:
    rows = [
        {
            "name": row.name,
            "kind": row.kind,
            "seconds": row.seconds,
            "prefill": _phase_time(row.prefill, rates),
            "decode": _phase_time(row.decode, rates),
        }
        for row in profile.rows
    ]
    return {"seconds": profile.seconds, "engine_share": profile.engine_share, "rows": rows}


def _phase_time(time: PhaseTime, rates: Rates | None) -> JsonObject:
    return {"calls": time.calls, "seconds": time.seconds, **_phase(time.work, rates)}


def _phase(phase: Phase, rates: Rates | None) -> JsonObject:
    counts = {"operations": phase.operations, "bytes_read": phase.bytes_read}
    if rates is None:
        return {**counts, "floor_s": None, "bound": None}
    by_bytes = phase.bytes_read / rates.bytes_per_s > phase.operations / rates.operations_per_s
    return {**counts, "floor_s": phase.floor_seconds(rates), "bound": "bytes" if by_bytes else "operations"}


def _figures(figures: dict[str, Figure]) -> JsonObject:
    return {name: _figure(figure) for name, figure in figures.items()}


def _figure(figure: Figure) -> JsonObject:
    best, worst = (max, min) if figure.higher_is_better else (min, max)
    return {
        "unit": figure.unit,
        "median": figure.median,
        "best": best(figure.values),
        "worst": worst(figure.values),
        "floor": figure.floor,
        "share": figure.share,
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Text and picture. ---

_MEGA, _GIGA = 1e6, 1e9
_WIDTH = 120
_LABEL = 10
_CELL = 14
_NAME = 36  # of a table row of a profile
_SHORTEST_SECONDS = 0.005  # of a start-up phase that is shown
_SMALLEST_SHARE = 0.0005  # of a profile's row that is shown


def as_text(report: Report) -> str:
    """All tables: the machine and the model, then each workload."""
    machine = report["machine"]
    lines = [
        *_machine(machine),
        *_model_table(report["model"]),
        *_startup(report["startup"]),
        *_memory_table(report["memory"], report["options"]["against"]),
    ]
    for name, workload in report["workloads"].items():
        lines += ["", f"{name}: {workload['about']}"]
        lines += [*_floors(workload, machine), *_against_table(workload["against"]), *_speed(workload)]
        lines += [*_engine(workload["engine"]), *_agreement(workload["against"]), *_profile_table(workload["profile"])]
    warnings = [f"warning: {text}" for text in report["warnings"]]
    return "\n".join([*lines, *([""] if warnings else []), *warnings])


def _machine(machine: Report | None) -> list[str]:
    if machine is None:
        return _labelled("machine", ["not calibrated: no floors"])
    rates = [
        f"{what} {machine[key]['best'] / _GIGA:.1f} {unit} (best of {machine[key]['repeats']}, "
        f"spread {machine[key]['spread']:.0%})"
        for what, key, unit in (
            ("reads memory", "read", "GB/s"),
            ("reads as many bytes as this model has", "near", "GB/s"),
            ("float32 GEMM", "gemm", "GFLOP/s"),
            ("this model's GEMM", "integer", "G/s"),
        )
        if machine[key]
    ]
    name = f"{machine['device_name']}, {_count(machine['threads'], 'thread')} on {_count(machine['cores'], 'core')}"
    formula = "floor = max(operations / GEMM rate, bytes read / read bandwidth), prefill and decode apart"
    return _labelled("machine", [name, *rates, f"{formula}; of floor = floor / time"])


def _model_table(model: Report) -> list[str]:
    stored = f"stored as {model['weight_dtype']}"
    if model["quantization"]:
        stored = f"quantized as {model['quantization']} from {model['weight_dtype']}"
    return _labelled(
        "model",
        [
            f"{model['name']} ({model['model_type']}), {model['parameters'] / _MEGA:.1f} M parameters, "
            f"computes in {model['dtype']}",
            f"weights {_mega(model['weight_bytes'])} {stored}, {_mega(model['bytes_per_step'])} read per step; "
            f"KV cache in {model['kv_cache_dtype']}",
        ],
    )


def _startup(startup: Report) -> list[str]:
    imports = {f"import {name}": seconds for name, seconds in startup["imports_s"].items()}
    phases = {**imports, **startup["phases_s"], "first tokens": startup["first_tokens_s"]}
    shown = [f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= _SHORTEST_SECONDS]
    lines = wrap(f"{startup['total_s']:.2f} s = {' + '.join(shown)}", _WIDTH - _LABEL)
    if startup["load_floor_s"] is not None:
        floor, seconds = startup["load_floor_s"], startup["phases_s"]["load weights"]
        lines.append(f"load weights: floor {floor:.3f} s (bytes / read bandwidth), {_percent(floor, seconds)} of floor")
    return _labelled("start-up", lines)


def _memory_table(memory: Report | None, rival: str | None) -> list[str]:
    if memory is None:
        reason = "private memory cannot be read on this system" if rival is None else f"{rival} is in the same process"
        return _labelled("memory", [f"not measured: {reason}"])
    least = memory["imports"] + memory["weights"]
    lines = [
        f"{phase}: peak private {_mega(peak)} = imports {_mega(memory['imports'])} + weights "
        f"{_mega(memory['weights'])} + {_mega(peak - least)} of KV cache and engine"
        for phase, peak in memory["peaks"].items()
    ]
    return _labelled("memory", lines)


def _floors(workload: Report, machine: Report | None) -> list[str]:
    """The floor's formula with this workload's numbers."""
    if machine is None:
        return []
    parts = [
        f"{name} {_number(part['operations'] / _GIGA)} GFLOP or {_number(part['bytes_read'] / _GIGA)} GB: "
        f"{_number(part['floor_s'])} s"
        for name, part in (("prefill", workload["prefill"]), ("decode", workload["decode"]))
    ]
    return [f"  {workload['prompt_tokens']} tokens in, {workload['output_tokens']} out; floor: {', '.join(parts)}"]


def _against_table(against: Report | None) -> list[str]:
    if against is None:
        return []
    return [f"  {line}" for line in wrap(f"against {against['about']}", _WIDTH - 2)]


def _speed(workload: Report) -> list[str]:
    against = workload["against"]
    rival = [] if against is None else [against["name"], "of floor", "we are"]
    lines = [_row(["", "median", "best", "worst", "floor", "of floor", *rival])]
    for name, figure in workload["figures"].items():
        cells = [name, *(_amount(figure, key) for key in ("median", "best", "worst", "floor")), _share(figure)]
        if against is not None:
            theirs = against["figures"][name]
            cells += [_amount(theirs, "median"), _share(theirs), f"{against['advantage'][name]:.2f}x"]
        lines.append(_row(cells))
    return lines


def _engine(engine: Report) -> list[str]:
    values = {name: figure["median"] for name, figure in engine.items()}
    steps = f"{values['steps']:.0f} steps of {values['step']:.2f} ms"
    own = f"the engine's own {values['own_per_step']:.2f} ms ({values['own_share']:.1f}%)"
    return [f"  {steps}, of which {own}; outside of steps {values['outside_steps']:.1f} ms"]


def _agreement(against: Report | None) -> list[str]:
    if against is None:
        return []
    found = against["agreement"]
    rows = f"{found['equal_rows']} of {found['rows']} rows to the end"
    return [f"  {found['equal_tokens']:.1%} of tokens equal, {rows} ({found['distinct_tokens']} different tokens)"]


def _profile_table(profile: Report | None) -> list[str]:
    if profile is None:
        return []
    total = profile["seconds"]
    shown = [row for row in profile["rows"] if row["seconds"] >= _SMALLEST_SHARE * total]
    rest = sum(row["seconds"] for row in profile["rows"]) - sum(row["seconds"] for row in shown)
    own = f"everything outside the model and the sampler: {profile['engine_share']:.1%}"
    phases = "".join(f"{f'{phase}: ms, rate, of floor':>32}" for phase in ("prefill", "decode"))
    return [
        f"  {'profile':{_NAME}}{'calls':>8}{'ms':>10}{'share':>8}{phases}",
        *(_profile_row(row, total) for row in shown),
        f"  {'(smaller rows)':{_NAME}}{1e3 * rest:18.2f}{rest / total:8.1%}",
        f"  {'sum':{_NAME}}{1e3 * (rest + sum(row['seconds'] for row in shown)):18.2f}{1:8.1%}   {own}",
    ]


def _profile_row(row: Report, total: float) -> str:
    prefill, decode = row["prefill"], row["decode"]
    name = row["name"] if row["kind"] == "operation" else f"{row['kind']}: {row['name']}"
    start = f"{prefill['calls'] + decode['calls']:8}{1e3 * row['seconds']:10.2f}{row['seconds'] / total:8.1%}"
    return f"  {name:{_NAME}}{start}{_phase_cells(prefill)}{_phase_cells(decode)}".rstrip()


def _phase_cells(time: Report) -> str:
    """Milliseconds and, if the operation's work is known, the rate that limits it and its share of the floor."""
    text = f"{1e3 * time['seconds']:10.2f}" if time["calls"] else ""
    if not time["floor_s"] or not time["seconds"]:
        return f"{text:32}"
    amount, unit = (time["bytes_read"], "GB/s") if time["bound"] == "bytes" else (time["operations"], "GFLOP/s")
    rate = f"{_number(amount / time['seconds'] / _GIGA)} {unit}"
    return f"{text}{rate:>15}{_percent(time['floor_s'], time['seconds']):>7}"


def _amount(figure: Report, key: str) -> str:
    return "-" if figure[key] is None else f"{_number(figure[key])} {figure['unit']}"


def _share(figure: Report) -> str:
    return "-" if figure["share"] is None else f"{figure['share']:.0%}"


def _number(value: float) -> str:
    """Three significant digits, more before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _mega(size: float) -> str:
    return f"{size / _MEGA:.0f} MB"


def _row(cells: Sequence[str]) -> str:
    return f"  {cells[0]:{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells[1:])


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{label if index == 0 else '':{_LABEL}}{line}" for index, line in enumerate(lines)]
