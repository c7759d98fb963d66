"""The benchmark's object (see `report.py`) as tables for reading.

Owns units and layout, and nothing that is not in the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MB, _GIGA = 1e6, 1e9
_LABEL = 10
_CELL = 14
_NAME = 40  # of a profile's row
_SHORTEST_SECONDS = 0.005  # of a start-up phase that is shown
_SMALLEST_SHARE = 0.0005  # of a profile's row that is shown

Report = dict[str, Any]


def as_text(report: Report) -> str:
    """All tables, each workload's after what is common to them."""
    lines = [
        *_machine(report["machine"]),
        *_model(report["model"]),
        *_startup(report["startup"]),
        *_memory(report["memory"]),
    ]
    for name, workload in report["workloads"].items():
        lines += ["", f"{name}: {workload['about']}", *_speed(workload), *_engine(workload["engine"])]
        lines += [*_agreement(workload["against"]), *_profile(workload["profile"])]
    lines += [f"\nwarning: {text}" for text in report["warnings"]]
    return "\n".join(lines)


def _machine(machine: Report | None) -> list[str]:
    if machine is None:
        return _labelled("machine", ["not calibrated: no floors"])
    rates = [
        f"{what} {machine[key]['best'] / _GIGA:.1f} {unit} (best of {machine[key]['repeats']}, "
        f"spread {machine[key]['spread']:.0%})"
        for what, key, unit in (("reads", "read", "GB/s"), ("float32 GEMM", "gemm", "GFLOP/s"))
    ]
    return _labelled("machine", [f"{machine['device_name']}, {machine['threads']} threads", ", ".join(rates)])


def _model(model: Report) -> list[str]:
    text = (
        f"{model['name']} ({model['model_type']}), {model['parameters'] / 1e6:.1f} M parameters in "
        f"{model['weight_dtype']}, {model['bytes_per_step'] / _MB:.0f} MB read per step, "
        f"KV cache in {model['kv_cache_dtype']}"
    )
    return _labelled("model", [text])


def _startup(startup: Report) -> list[str]:
    imports = {f"import {name}": seconds for name, seconds in startup["imports_s"].items()}
    phases = {**imports, **startup["phases_s"], "first tokens": startup["first_tokens_s"]}
    shown = [f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= _SHORTEST_SECONDS]
    return _labelled("start-up", [f"{sum(phases.values()):.2f} s = {' + '.join(shown)}"])


def _memory(memory: Report | None) -> list[str]:
    if memory is None:
        return _labelled("memory", ["not measured"])
    lines = [
        f"{phase}: peak {use['peak'] / _MB:.0f} MB = imports {use['imports'] / _MB:.0f} + weights "
        f"{use['weights'] / _MB:.0f} + KV cache {use['kv_cache'] / _MB:.0f} + {use['overhead'] / _MB:.0f} of our own"
        for phase, use in memory["phases"].items()
    ]
    return _labelled("memory", lines)


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
    head = f"{'calls':>8}{'prefill s':>11}{'decode s':>11}{'share':>8}{'prefill':>16}{'decode':>14}"
    own = f"everything outside the model and the sampler: {profile['engine_share']:.1%}"
    return [
        f"  {'':{_NAME}}{head}",
        *(_profile_row(row, total) for row in shown),
        f"  {'(smaller rows)':{_NAME}}{rest:30.3f}{rest / total:8.1%}",
        f"  {'sum':{_NAME}}{total:30.3f}{1:8.1%}   {own}",
    ]


def _profile_row(row: Report, total: float) -> str:
    prefill, decode = row["prefill"], row["decode"]
    name = row["name"] if row["kind"] == "operation" else f"{row['kind']}: {row['name']}"
    times = f"{prefill['calls'] + decode['calls']:8}{prefill['seconds']:11.3f}{decode['seconds']:11.3f}"
    rates = f"{_rate(prefill, 'operations', 'GFLOP/s'):>16}{_rate(decode, 'bytes_read', 'GB/s'):>14}"
    return f"  {name:{_NAME}}{times}{row['seconds'] / total:8.1%}{rates}".rstrip()


def _rate(time: Report, key: str, unit: str) -> str:
    return f"{time[key] / time['seconds'] / _GIGA:.1f} {unit}" if time[key] and time["seconds"] else ""


def _amount(figure: Report, key: str) -> str:
    return "-" if figure[key] is None else f"{figure[key]:.1f} {figure['unit']}"


def _share(figure: Report) -> str:
    return "-" if figure["share"] is None else f"{figure['share']:.0%}"


def _row(cells: Sequence[str]) -> str:
    return f"  {cells[0]:{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells[1:])


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{label if index == 0 else '':{_LABEL}}{line}" for index, line in enumerate(lines)]
