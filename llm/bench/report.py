"""The measurements as one JSON object, which `--json` prints and `tables.py` renders.

Owns the schema, version 1. Times are seconds where a key ends in `_s`, sizes bytes where it ends in `_bytes`.

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
bytes read / read bandwidth), see `cost.py`; of loading, the bytes of the weights / read bandwidth.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata

import torch

from llm import __version__
from llm.base.types import JsonObject
from llm.bench.compare import Transformers, advantage
from llm.bench.cost import decode_cost, prefill_cost
from llm.bench.measure import Figure, Ours
from llm.bench.profile import Profile
from llm.bench.session import BenchResult, WorkloadResult
from llm.engine.boundary import Phase, PhaseTime, Rates

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
