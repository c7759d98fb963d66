"""What was measured as one object, which `--json` prints and `tables.py` lays out.

Owns the schema, version 1. Times are seconds where a key ends in `_s`, sizes bytes where it ends in `_bytes`.

    schema, version, torch, transformers
    options             as given
    machine             device, cores, threads, read and gemm {best, spread, repeats}, other_cores; null when skipped
    model               name, model_type, architecture, weight_dtype, kv_cache_dtype, max_model_len, parameters,
                        linear_weights, head_weights, bytes_per_step, weight_bytes
    startup             imports_s {module: seconds}, phases_s {phase: seconds}, build_s, first_tokens_s
    memory              phases {phase: {imports, weights, kv_cache, peak, overhead, all in bytes}}, overhead_bytes (the
                        largest), peak_resident_bytes; null where it cannot be known
    workloads           name -> about, prompts, prompt_tokens, output_tokens, reps, prefill and decode {operations,
                        bytes_read}, figures, engine, other_cores, against (null, or name, figures, advantage
                        {figure: ratio of medians, above 1 where we are better}, agreement), profile (null, or
                        seconds, engine_share, rows)
    warnings            sentences

A figure is {unit, median, best, worst, floor, share}: `floor` is the best the machine allows, `share` how near the
median is to it (1: as good as can be); both null when nothing was calibrated or there is no such limit.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from llm import __version__
from llm.bench.compare import advantage
from llm.bench.cost import Phase, decode_cost, prefill_cost
from llm.bench.measure import Figure, Ours
from llm.bench.profile import Profile
from llm.bench.session import BenchResult, WorkloadResult

SCHEMA = 1


def as_object(result: BenchResult) -> dict[str, Any]:
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
            "build_s": sum(result.startup.values()),
            "first_tokens_s": result.first_tokens_seconds,
        },
        "memory": _memory(result),
        "workloads": {name: _workload(result, item) for name, item in result.workloads.items()},
        "warnings": result.warnings,
    }


def _model(result: BenchResult) -> dict[str, Any]:
    config, cost = result.config.model_config, result.cost
    return {
        "name": result.options.shape or result.options.model or "embedded",
        "model_type": config.model_type,
        "architecture": config.architecture,
        "weight_dtype": _dtype(config.weight_dtype),
        "kv_cache_dtype": _dtype(result.config.cache_config.kv_cache_dtype),
        "max_model_len": config.max_model_len,
        "parameters": cost.parameters,
        "linear_weights": cost.linear_weights,
        "head_weights": cost.head_weights,
        "bytes_per_step": cost.bytes_per_step,
        "weight_bytes": cost.weight_bytes,
    }


def _memory(result: BenchResult) -> dict[str, Any] | None:
    if not result.memory:
        return None
    return {
        "phases": {name: {**dataclasses.asdict(use), "overhead": use.overhead} for name, use in result.memory.items()},
        "overhead_bytes": max(use.overhead for use in result.memory.values()),
        "peak_resident_bytes": result.peak_resident,
    }


def _workload(result: BenchResult, item: WorkloadResult) -> dict[str, Any]:
    runs = item.runs[Ours.name]
    workload = runs[0].workload
    return {
        "about": workload.recipe.about,
        "prompts": len(workload.prompts),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "reps": len(runs),
        "prefill": _phase(prefill_cost(result.cost, workload)),
        "decode": _phase(decode_cost(result.cost, workload)),
        "figures": _figures(item.speed[Ours.name]),
        "engine": _figures(item.engine),
        "other_cores": [run.other_cores for run in runs],
        "against": _against(item, result.options.against),
        "profile": None if item.profile is None else _profile(item.profile),
    }


def _against(item: WorkloadResult, rival: str | None) -> dict[str, Any] | None:
    if rival is None or item.agreement is None:
        return None
    ours, theirs = item.speed[Ours.name], item.speed[rival]
    return {
        "name": rival,
        "figures": _figures(theirs),
        "advantage": {name: advantage(figure, theirs[name]) for name, figure in ours.items()},
        "agreement": dataclasses.asdict(item.agreement),
    }


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "seconds": profile.seconds,
        "engine_share": profile.engine_share,
        "rows": [dataclasses.asdict(row) | {"seconds": row.seconds} for row in profile.rows],
    }


def _phase(phase: Phase) -> dict[str, int]:
    return {"operations": phase.operations, "bytes_read": phase.bytes_read}


def _figures(figures: dict[str, Figure]) -> dict[str, Any]:
    return {name: _figure(figure) for name, figure in figures.items()}


def _figure(figure: Figure) -> dict[str, Any]:
    best, worst = (max, min) if figure.higher_is_better else (min, max)
    return {
        "unit": figure.unit,
        "median": figure.median,
        "best": best(figure.values),
        "worst": worst(figure.values),
        "floor": figure.floor,
        "share": figure.share,
    }


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
