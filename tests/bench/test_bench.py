"""`python -m llm bench`: the arithmetic of its floors, where its profile puts time, and what a user reads.

Independent numbers: parameter counts that the models' authors publish, and operations and token ids of the workloads as
other engines were measured with them. Nothing here asserts how fast anything is.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import copy_model, engine_of, open_llm, python

from llm.cli import main
from llm.engine.boundary import Phase, Rates, pairs
from llm.engine.stats import EngineStats
from llm.errors import ValidationError
from llm.models.config_reader import ConfigReader
from llm.models.interface import BuildOptions
from llm.models.registry import resolve_model_cls
from llm.runner.inspection import AttentionCost, ModelCost, count_model
from llm.tools.bench import machine, session
from llm.tools.bench import workloads as shapes
from llm.tools.bench.measure import (
    Ours,
    Run,
    Transformers,
    agreement,
    decode_cost,
    engine_figures,
    prefill_cost,
    private_bytes,
    speed_figures,
)
from llm.tools.bench.report import as_text
from llm.tools.bench.session import profile
from llm.tools.bench.workloads import RECIPES, SHAPES, make_workload

MILLION, TERA, MB = 1e6, 1e12, 1 << 20
DELAY = 0.1  # seconds, planted
TINY_SHAPE = shapes._llama(48, 2, 4, 2, 96, 300, positions=512, theta=1e4)


@pytest.fixture(autouse=True, scope="module")
def small_machine() -> Iterator[None]:
    """One thread, and a calibration that reads little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_READ_BYTES", 1 << 22)
        patch.setitem(SHAPES, "tiny-shape", TINY_SHAPE)
        yield
    torch.set_num_threads(threads)


def bench(*args: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of one run with a short calibration."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["bench", "--reps", "2", "--calibrate", "0.02", *args])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """JSON of the embedded model: a stream with its profile, and a batch."""
    status, out, err = bench("--workload", "s1,s32", "--profile", "--json")
    assert status == 0, err
    return json.loads(out)


def count_shape(name: str, dtype: torch.dtype = torch.float32) -> ModelCost:
    """Of the whole model, built without memory."""
    reader = ConfigReader(dict(SHAPES[name]))
    family = resolve_model_cls(SHAPES[name]["architectures"], reader.family)
    with torch.device("meta"):
        return count_model(family(family.read_config(reader), BuildOptions(512, dtype)), dtype)


# Workloads and shapes.


@pytest.mark.parametrize(
    "name, digest",
    [
        ("w1", "60cf4370d9ec87c1"),
        ("w2", "880989faf3981c7d"),
        ("w3", "825f0af444242ebb"),
        ("w4", "a3383416509ed86a"),
        ("s1", "7ecb52223b7b5340"),
        ("s32", "c465e867b2888d12"),
        ("tiny", "b2caa02d3e9849a4"),
    ],
)
def test_token_ids_are_those_other_engines_were_measured_with(name: str, digest: str) -> None:
    made = [[(workload := make_workload(name, rep)).prompts, workload.recipe.max_tokens] for rep in (0, 1, 100)]
    assert hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16] == digest


def test_a_small_vocabulary_gets_ids_it_has() -> None:
    folded = make_workload("w2", 0, vocab_size=300).prompts
    assert {min(map(min, folded)), max(map(max, folded))} <= set(range(3, 300))
    assert [len(prompt) for prompt in folded] == [len(prompt) for prompt in make_workload("w2").prompts]


@pytest.mark.parametrize(
    "name, parameters",  # in millions, as published
    [
        ("smollm2-135m", 134.5),
        ("smollm2-360m", 361.8),
        ("smollm2-1.7b", 1711.4),
        ("tinyllama-1.1b", 1100.0),
        ("llama-3.2-1b", 1235.8),
        ("llama-3.2-3b", 3212.7),
        ("llama-3.1-8b", 8030.3),
        ("qwen2.5-0.5b", 494.0),
        ("qwen2.5-1.5b", 1543.7),
        ("qwen2.5-7b", 7615.6),
        ("qwen3-0.6b", 596.0),
        ("qwen3-1.7b", 1720.6),
        ("qwen3-4b", 4022.5),
        # Of the published ones, 48 and 24 layers with 151,936 and 201,088 words.
        ("qwen3-30b-a3b-6gb", (30532.1 - 2 * 2048 * 0.151936) * 5 / 48 + 2 * 2048 * 0.032768),
        ("gpt-oss-20b-6gb", (20914.8 - 2 * 2880 * 0.201088) * 4 / 24 + 2 * 2880 * 0.032768),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: float) -> None:
    assert count_shape(name).parameters / MILLION == pytest.approx(parameters, abs=0.05)


# Floors.


def test_a_shape_that_is_not_in_the_table_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match=f"^shape must be one of .*Did you mean '{next(iter(SHAPES))}'"):
        shapes.find_shape(next(iter(SHAPES)) + "x")


def test_bytes_of_a_shape() -> None:
    model_a = count_shape("qwen2.5-0.5b")
    assert (model_a.linear_weights, model_a.head_weights) == (pytest.approx(357.8e6, abs=5e4), 151936 * 896)
    assert model_a.bytes_per_step == model_a.weight_bytes == 4 * model_a.parameters  # tied: nothing is only looked up
    assert count_shape("qwen2.5-0.5b", torch.bfloat16).weight_bytes == 2 * model_a.parameters
    model_b = count_shape("model-b")
    assert model_b.weight_bytes - model_b.bytes_per_step == 4 * 8192 * 512  # the untied embedding


@pytest.mark.parametrize("name, shape, expected", [("w2", "qwen2.5-0.5b", 5.39), ("w4", "model-b", 1.47)])
def test_operations_of_workloads(name: str, shape: str, expected: float) -> None:
    """Without attention, which the published figures leave out."""
    cost, workload = replace(count_shape(shape), attention=Counter()), make_workload(name)
    total = prefill_cost(cost, workload) + decode_cost(cost, workload)
    assert total.operations / TERA == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_pairs_are_counted_as_by_hand(window: int | None) -> None:
    for start in range(12):
        for end in range(start, 14):
            assert pairs(start, end, window) == sum(min(p + 1, window or p + 1) for p in range(start, end))


def test_work_of_phases_by_hand() -> None:
    """One row of 16 and 64 steps; one layer of 2 operations per pair and 3 bytes per token."""
    cost = ModelCost(0, 10, 5, 700, 800, Counter([AttentionCost(2, 3, None)]))
    workload = make_workload("s1")
    assert prefill_cost(cost, workload) == Phase(2 * (16 * 10 + 5) + 2 * sum(range(1, 17)), 700)
    seen = sum(range(17, 81))
    assert decode_cost(cost, workload) == Phase(2 * 64 * (10 + 5) + 2 * seen, 64 * 700 + 3 * seen)
    recurrent = decode_cost(replace(cost, state_bytes=7), workload)
    assert recurrent.bytes_read == 64 * (700 + 2 * 7) + 3 * seen


def test_a_floor_is_the_longer_of_computing_and_reading() -> None:
    assert Phase(100, 30).floor_seconds(Rates(bytes_per_s=10, operations_per_s=50)) == 3.0
    assert Phase(100, 30).floor_seconds(Rates(bytes_per_s=100, operations_per_s=50)) == 2.0


def test_rates_are_the_best_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0, 4, 0, 2, 0, 5, 0, 4, 0, 8, 1e9])
    monkeypatch.setattr(machine, "perf_counter", lambda: float(next(ticks)))
    rate = machine._repeat(lambda: None, 100, seconds=0.0)
    assert (rate.best, rate.spread, rate.repeats) == (50.0, 0.5, 5)


def test_a_floor_has_the_rates_of_the_models_bytes_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(quantization="w8a8") as opened:
        cost = engine_of(opened).runner.cost()
    assert cost.arithmetic == {("int8", "int8")}
    known = machine.Calibration("", 1, 1, machine.Rate(1.0, 0.0, 5), machine.Rate(1.0, 0.0, 5), None)
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 30)
    measured = machine.calibrate_for(known, cost, seconds=0)
    assert measured.near and measured.integer and measured.rates == Rates(measured.near.best, measured.integer.best)
    assert min(measured.near.best, measured.integer.best) > 1e6
    fast = replace(known, read=machine.Rate(1e30, 0.0, 5), gemm=machine.Rate(1e30, 0.0, 5))
    assert machine.calibrate_for(fast, cost, seconds=0).rates == fast.rates
    large = replace(cost, bytes_per_step=1 << 30, arithmetic=frozenset())
    assert machine.calibrate_for(known, large, seconds=0) == known


# From times to figures.


def made_run(name: str, seconds: float, prefill: float | None) -> Run:
    stats = EngineStats(steps=10, seconds=0.9 * seconds, model_seconds=0.8 * seconds)
    return Run(make_workload(name), seconds, prefill, [], stats, None)


def test_figures_of_a_stream() -> None:
    runs = [made_run("w1", seconds, 0.1) for seconds in (1.37, 2.64, 14.07)]
    cost, rates = ModelCost(0, 1000, 0, 200, 200), Rates(bytes_per_s=1e5, operations_per_s=2e6)
    figures = speed_figures(runs, cost, rates)
    assert figures["prefill"].median == pytest.approx(100)
    assert figures["prefill"].floor == pytest.approx(1e3 * 2 * 128 * 1000 / 2e6)
    assert figures["step"].values == pytest.approx((10, 20, 110))
    assert figures["step"].floor == pytest.approx(1e3 * 200 / 1e5)  # reading 200 bytes takes longer than computing
    assert figures["step"].share == pytest.approx(0.1)
    assert (figures["decode"].median, figures["decode"].share) == (pytest.approx(50), pytest.approx(0.1))


def test_figures_of_a_batch() -> None:
    runs = [made_run("w2", 64.0, None)]
    figures = speed_figures(runs, ModelCost(0, 0, 1, 0, 0), Rates(bytes_per_s=1.0, operations_per_s=128.0))
    assert (figures["output"].median, figures["output"].floor) == (32.0, 64.0)
    assert figures["output"].share == figures["seconds"].share == 0.5
    assert figures["total"].median == (runs[0].workload.prompt_tokens + 2048) / 64
    engine = engine_figures(runs)
    assert engine["own_per_step"].median == pytest.approx(640)
    assert engine["outside_steps"].median == pytest.approx(6400)
    assert speed_figures(runs, ModelCost(0, 0, 1, 0, 0), None)["output"].share is None


def test_agreement() -> None:
    same = agreement([[[1, 2, 3], [4, 5, 6]]], [[[1, 2, 3], [4, 5, 6]]])
    assert (same.equal_tokens, same.equal_rows, same.rows, same.distinct_tokens) == (1.0, 2, 2, 6)
    other = agreement([[[1, 2, 3], [4, 5, 6]]], [[[1, 2, 9], [4, 5]]])
    assert (other.equal_tokens, other.equal_rows) == (4 / 6, 0)


def test_peak_memory_sees_what_was_freed() -> None:
    """In a process of its own, where nothing else allocates."""
    if private_bytes() is None:
        pytest.skip("no /proc")
    done = python("-c", PEAK)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


PEAK = """
import time
import torch
from llm.tools.bench.measure import PeakMemory
MB = 1 << 20
with PeakMemory() as memory:
    before = memory.take()
    held = torch.ones(16 * MB)  # 64 MB
    deadline = time.monotonic() + 30
    while memory._peak < before + 60 * MB and time.monotonic() < deadline:
        time.sleep(0.01)
    del held
    print(memory.take() > before + 60 * MB, memory.take() < before + 30 * MB)  # a mark forgets
"""


# The object.


def test_every_figure_has_its_floor_and_share(report: dict[str, Any]) -> None:
    read, gemm = (report["machine"][key]["best"] for key in ("read", "gemm"))
    for workload in report["workloads"].values():
        for phase in (workload["prefill"], workload["decode"]):
            by_operations, by_bytes = phase["operations"] / gemm, phase["bytes_read"] / read
            assert phase["floor_s"] == pytest.approx(max(by_operations, by_bytes))
            assert phase["bound"] == ("bytes" if by_bytes > by_operations else "operations")
        figures = workload["figures"]
        assert figures["prefill"]["floor"] == pytest.approx(1e3 * workload["prefill"]["floor_s"])
        assert figures["step"]["floor"] == pytest.approx(1e3 * workload["decode"]["floor_s"] / 64)
        for figure in figures.values():
            ratio = figure["median"] / figure["floor"]
            assert figure["share"] == pytest.approx(1 / ratio if figure["unit"] == "ms" else ratio)
            values = [figure[key] for key in ("best", "median", "worst")]
            assert sorted(values, reverse=figure["unit"] == "tok/s") == values


def test_the_object_has_start_up_memory_and_bytes(report: dict[str, Any]) -> None:
    assert report["schema"] == 1
    assert {"read config", "build model", "load weights", "allocate KV cache"} <= set(report["startup"]["phases_s"])
    weights = sum(path.stat().st_size for path in session.EMBEDDED_MODEL.glob("*.safetensors"))
    assert report["model"]["weight_bytes"] == pytest.approx(weights, rel=0.01)
    read = report["startup"]["load_floor_s"] * report["machine"]["read"]["best"]
    assert read == pytest.approx(report["model"]["weight_bytes"])
    assert set(report["memory"]["peaks"]) == {"load", "s1", "s32"}
    engine = report["workloads"]["s32"]["engine"]
    assert engine["steps"]["median"] == 65
    assert 0 < engine["own_per_step"]["median"] < engine["step"]["median"]


def test_memory_grows_from_the_imports_on() -> None:
    """In a process of its own: in one that has run other tests, loading may find memory that they left to the heap."""
    done = python("-m", "llm", "bench", "--workload", "tiny", "--reps", "1", "--calibrate", "0", "--json")
    memory = json.loads(done.stdout)["memory"]
    if memory["imports"] is None:
        pytest.skip("no /proc")
    assert memory["imports"] > 50 * MB
    assert min(memory["peaks"].values()) > memory["imports"] + memory["weights"]


def test_profile_adds_up(report: dict[str, Any]) -> None:
    found = report["workloads"]["s32"]["profile"]
    assert sum(row["seconds"] for row in found["rows"]) == pytest.approx(found["seconds"], rel=0.02)
    rows = {row["name"]: row for row in found["rows"]}
    calls = {name: [row["prefill"]["calls"], row["decode"]["calls"]] for name, row in rows.items()}
    assert calls["attention"] == [4, 4 * 64]
    assert calls["KV cache"] == [4, 4 * 64]
    assert calls["rotary_embedding"] == [4, 4 * 64]
    assert calls["linear gate_up_proj 256 -> 1024"] == [4, 4 * 64]
    assert calls["rms_norm"] == [9, 9 * 64]
    assert calls["lm head 256 -> 2304"] == [1, 64]
    operations = sum(row["decode"]["operations"] for row in rows.values())
    assert operations == report["workloads"]["s32"]["decode"]["operations"]
    assert rows["lm head 256 -> 2304"]["decode"]["bytes_read"] == 64 * 2 * 256 * 2304


# The profile.


def test_profile_finds_time_that_is_not_pytorch_s_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted delay in an operation's kernel, in one layer's `apply` and in the scheduler: each in its own row."""
    with open_llm() as llm:
        engine = engine_of(llm)
        modules = dict(engine.runner.model.named_modules())
        norm = next(module for module in modules.values() if getattr(module, "name", "") == "rms_norm")
        layer = next(module for name, module in modules.items() if name.endswith("down_proj"))
        now = [0.0]  # a clock that only the planted delays move
        for module in ("llm.runner.profile", "llm.tools.bench.session"):
            monkeypatch.setattr(f"{module}.perf_counter", lambda: now[0])
        for target, attribute in ((norm, "_forward_method"), (layer.quant_method, "apply")):
            slow(monkeypatch, target, attribute, now)
        slow(monkeypatch, engine.scheduler, "schedule", now)
        Ours(llm).generate([[5, 6]], 2)  # blocks keep what they found out in their first call
        before, sampler = [set(vars(thing)) for thing in watched(engine)], engine.runner.sampler
        workload = make_workload("tiny", 0, llm.config.model_config.vocab_size)
        found = profile(engine, lambda: Ours(llm).generate(workload.prompts, 2))
        assert [set(vars(thing)) for thing in watched(engine)] == before
        assert engine.runner.sampler is sampler
    rows = {row.name: row for row in found.rows}
    for name in ("rms_norm", "linear down_proj 512 -> 256", "scheduler"):
        assert rows.pop(name).seconds == pytest.approx(2 * DELAY), name
    assert max(abs(row.seconds) for row in rows.values()) < 1e-6
    assert found.engine_share == pytest.approx(2 * DELAY / found.seconds)


def slow(monkeypatch: pytest.MonkeyPatch, target: Any, attribute: str, now: list[float]) -> None:
    original = getattr(target, attribute)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        now[0] += DELAY
        return original(*args, **kwargs)

    monkeypatch.setattr(target, attribute, delayed)


def watched(engine: Any) -> list[Any]:
    modules = list(engine.runner.model.modules())
    parts = [
        getattr(module, name) for module in modules for name in ("quant_method", "backend") if hasattr(module, name)
    ]
    return [engine, engine.scheduler, engine.runner, engine.runner.batch, *modules, *parts]


def test_layers_that_share_a_method_have_rows_of_their_own() -> None:
    with open_llm() as llm:
        engine = engine_of(llm)
        linear = [m for m in engine.runner.model.modules() if getattr(m, "quant_kind", "") == "linear"]
        for layer in linear:
            layer.quant_method = linear[0].quant_method
        workload = make_workload("tiny", 0, llm.config.model_config.vocab_size)
        found = profile(engine, lambda: Ours(llm).generate(workload.prompts, 2))
    calls = {row.name: row.prefill.calls for row in found.rows if "linear" in row.name}
    assert set(calls.values()) == {4}
    assert len(calls) == 4


# What a user reads.


def test_tables(report: dict[str, Any]) -> None:
    text = as_text(report)
    for wanted in ("of floor", "GB/s", "GFLOP/s", "read per step", "peak private", "start-up", "the engine's own"):
        assert wanted in text
    assert max(map(len, text.splitlines())) <= 140
    assert "100.0%   everything outside the model" in text


def test_quantized_weights_are_counted_as_they_are_stored() -> None:
    """The embedded model's bfloat16 layers in 8 bits: half the bytes and the scales; the same operations."""
    status, out, err = bench("--workload", "tiny", "--quantization", "w8a8", "--profile", "--json")
    assert status == 0, err
    result = json.loads(out)
    with open_llm() as llm:
        whole = count_model(engine_of(llm).runner.model, torch.bfloat16)
    saved = whole.weight_bytes - result["model"]["weight_bytes"]
    assert 0.9 * whole.linear_weights < saved <= whole.linear_weights + whole.head_weights
    assert result["model"]["linear_weights"] == whole.linear_weights
    workload = result["workloads"]["tiny"]
    rows = {row["name"]: row["decode"] for row in workload["profile"]["rows"]}
    assert sum(row["operations"] for row in rows.values()) == workload["decode"]["operations"]
    size = 4 * 512 * 256  # of 4 layers in 8 bits
    down = next(row for name, row in rows.items() if name.endswith("linear down_proj 512 -> 256"))
    assert size < down["bytes_read"] < 1.2 * size
    assert "MB quantized as w8a8 from bfloat16" in as_text(result)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_against_transformers_on_a_shape(weight_dtype: str) -> None:
    """Both say the same, so both had the same weights and computed alike; the ratio is that of the medians."""
    args = ("--shape", "tiny-shape", "--weight-dtype", weight_dtype, "--workload", "s32", "--against", "transformers")
    status, out, err = bench(*args, "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["model"]["weight_dtype"] == weight_dtype
    assert result["memory"] is None
    workload = result["workloads"]["s32"]
    found = workload["against"]
    assert found["agreement"]["equal_tokens"] > 0.99
    assert found["agreement"]["distinct_tokens"] > 20
    for name, better in (("step", -1), ("decode", 1)):
        ratio = workload["figures"][name]["median"] / found["figures"][name]["median"]
        assert found["advantage"][name] == pytest.approx(ratio**better)
    text = as_text(result)
    assert f"{found['advantage']['step']:.2f}x" in text
    assert "computing in float32 as we do" in text


def test_the_rival_s_rope_is_exact_whatever_the_weights_are_stored_as(tmp_path: Path) -> None:
    """Converting a built model to bfloat16 and back would leave its frequencies rounded, and its tokens wrong."""
    shapes.write_config("tiny-shape", "bfloat16", tmp_path)
    rival = Transformers.from_config(tmp_path, torch.bfloat16).model
    expected = [1e4 ** (-2 * i / 12) for i in range(6)]
    assert rival.model.rotary_emb.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(rival.lm_head.weight, rival.lm_head.weight.bfloat16().float())


def test_the_rival_is_said_to_be_unquantized() -> None:
    assert "ours are quantized: w8a8" in Transformers.describe("w8a8")
    assert "quantized" not in Transformers.describe(None)


def test_against_transformers_on_a_checkpoint() -> None:
    status, out, err = bench("--workload", "tiny", "--against", "transformers", "--json")
    assert status == 0, err
    assert json.loads(out)["workloads"]["tiny"]["against"]["agreement"]["equal_tokens"] == 1.0


def test_without_calibration_there_are_no_floors() -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["bench", "--workload", "tiny", "--reps", "1", "--calibrate", "0", "--profile"]) == 0
    assert "not calibrated: no floors" in out.getvalue()
    assert "of floor = " not in out.getvalue()


def test_arguments_reach_the_engine(tmp_path: Path) -> None:
    model = copy_model(tmp_path / "model")
    args = (
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--option",
        "block_size=8",
        "--option",
        "kv_cache_dtype=float32",
    )
    status, out, err = bench("--workload", "tiny", "--threads", "1", *args, "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["model"]["kv_cache_dtype"] == "float32"
    assert result["machine"]["threads"] == 1
    assert result["options"]["engine"] == {"block_size": 8, "kv_cache_dtype": "float32", "dtype": "float32"}


@pytest.mark.parametrize(
    "args, wanted",
    [
        (["--workload", "w9"], "workload must be one of w1, w2, w3, w4, s1, s32, tiny, got 'w9'."),
        (["--shape", "qwen2.5-0.5"], "Did you mean 'qwen2.5-0.5b'?"),
        (["--shape", "model-b", "--model", "x"], "--shape must be left out when --model is given, got 'model-b'."),
        (["--weight-dtype", "bfloat16"], "--weight-dtype must be left out without --shape"),
        (
            ["--shape", "model-b", "--weight-dtype", "int3"],
            "--weight-dtype must be one of float32, bfloat16, got 'int3'.",
        ),
        (["--against", "vllm"], "--against must be one of transformers, got 'vllm'."),
        (["--reps", "0"], "--reps must be 1 to 100, got 0."),
        (["--reps", "101"], "--reps must be 1 to 100, got 101."),
        (["--threads", "0"], "--threads must be at least 1, got 0."),
        (["--calibrate", "-1"], "--calibrate must be a number of seconds, 0 for none, got -1.0."),
        (["--calibrate", "inf"], "--calibrate must be a number of seconds, 0 for none, got inf."),
        (["--option", "seed"], "--option must be NAME=VALUE, got 'seed'."),
        (["--option", "model=x"], "--option must be left out: --model sets it, got 'model=x'."),
        (["--option", "blok_size=8"], "blok_size"),
        (["--quantization", "nonsense"], "quantization"),
        (
            ["--dtype", "float8"],
            "dtype must be 'auto' or one of bfloat16, float16, float32, got 'float8'.",
        ),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_mistake_gets_one_sentence(args: list[str], wanted: str) -> None:
    status, out, err = bench("--workload", "tiny", *args)
    assert (status, out) == (1, "")
    errors = [line for line in err.splitlines() if not line.startswith("[")]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert wanted in errors[0]


def test_help_imports_no_pytorch_and_names_everything() -> None:
    code = (
        "import sys; from llm.cli import main\ntry: main(['bench', '--help'])\nfinally: print('torch' in sys.modules)"
    )
    result = python("-c", code)
    assert result.stdout.endswith("False\n")
    text = " ".join(result.stdout.split())
    assert all(f"{name} = {recipe.about}" in text for name, recipe in RECIPES.items())
    assert "llama-3.2-1b" in text


def test_speculation_is_measured_with_and_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing about speed: how long a run takes depends on the machine."""
    assert main(["bench", "--speculation", "--reps", "1", "--json"]) == 0
    figures = {figure["workload"]: figure for figure in json.loads(capsys.readouterr().out)["speculation"]}
    assert list(figures) == ["w5", "w6", "free"]
    assert figures["w5"]["tokens"] == 192
    assert figures["free"]["tokens"] == 128
    assert all(figure["accepted"] <= figure["drafted"] for figure in figures.values())
    assert main(["bench", "--speculation", "--workload", "w1"]) == 1
    assert "--speculation must be without workloads" in capsys.readouterr().err
