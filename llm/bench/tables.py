"""The benchmark's JSON object (see `report.py`) as text tables.

Owns units and layout. Shows nothing that is not in the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from llm.base.types import JsonObject as Report

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
        *_model(report["model"]),
        *_startup(report["startup"]),
        *_memory(report["memory"], report["options"]["against"]),
    ]
    for name, workload in report["workloads"].items():
        lines += ["", f"{name}: {workload['about']}"]
        lines += [*_floors(workload, machine), *_against(workload["against"]), *_speed(workload)]
        lines += [*_engine(workload["engine"]), *_agreement(workload["against"]), *_profile(workload["profile"])]
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


def _model(model: Report) -> list[str]:
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


def _memory(memory: Report | None, rival: str | None) -> list[str]:
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


def _against(against: Report | None) -> list[str]:
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


def _profile(profile: Report | None) -> list[str]:
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
    return f"  {name:{_NAME}}{start}{_phase_time(prefill)}{_phase_time(decode)}".rstrip()


def _phase_time(time: Report) -> str:
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
