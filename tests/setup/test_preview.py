"""`LLM.plan` against what `LLM(...)` then takes and allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of, open_llm, run
from kernel_sets import has_kernels, needs_kernels
from tiny_models import TINY_MODELS, TinyModel, write_checkpoint

from llm import LLM, SamplingParams, ValidationError
from llm.base import system
from llm.cli import main
from llm.errors import OutOfMemoryError
from llm.llm import EMBEDDED_MODEL
from llm.loading.checkpoint import Checkpoint
from llm.platforms.cpu import CpuPlatform
from llm.setup.preview import ModelPlan
from llm.tools.bench import machine as stored
from llm.tools.bench.machine import Calibration, Rate

MIB = 1 << 20


def tensors_of_cache(llm: LLM) -> int:
    states = engine_of(llm).runner.states
    return sum(tensor.nbytes for state in states for tensor in state)


def assert_agrees(plan: ModelPlan, llm: LLM, tolerance: float = 0.0) -> None:
    config = llm.config
    stats = llm.stats()
    assert plan.weight_bytes == pytest.approx(stats.weight_bytes, rel=tolerance, abs=0)
    assert plan.kv_cache_bytes == stats.kv_cache_bytes == config.cache_config.kv_cache_memory_bytes
    assert (plan.num_blocks, plan.block_size) == (config.cache_config.num_blocks, config.cache_config.block_size)
    assert plan.max_model_len == config.model_config.max_model_len
    assert plan.max_num_seqs == config.scheduler_config.max_num_seqs
    assert plan.num_state_slots == config.cache_config.num_state_slots
    assert plan.num_state_snapshots == config.cache_config.num_state_snapshots
    # Besides what requests can be given there is a block of zeros, one for the kernels, and a state.
    spare = 2 * plan.kv_bytes_per_token * plan.block_size + plan.state_bytes_per_request
    assert 0 < tensors_of_cache(llm) - plan.kv_cache_bytes <= spare


@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a16", "nf4", {"scheme": "w4a8", "ignore": ["*.down_proj"]}])
def test_it_says_what_is_then_taken(quantization: Any) -> None:
    arguments: Any = {"quantization": quantization, "max_model_len": 256, "max_num_seqs": 3}
    plan = LLM.plan(**arguments)
    assert plan.fits and plan.is_exact and str(plan)
    with open_llm(**arguments) as llm:
        assert_agrees(plan, llm)
    name = quantization if isinstance(quantization, str) else "none"
    if not isinstance(quantization, dict):
        assert plan.bytes_by_scheme[name] == plan.weight_bytes


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "minicpm3"])
def test_odd_sizes_biases_experts_and_latent_attention(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_checkpoint(TINY_MODELS[name], folder)
    arguments: Any = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    plan = LLM.plan(folder, **arguments)
    with open_llm(folder, **arguments) as llm:
        assert_agrees(plan, llm, tolerance=0.08)  # kernels hold 91 rows as 96


@pytest.mark.parametrize("name", ["mamba", "granitemoehybrid"])
def test_recurrent_states_and_their_copies_are_counted(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_checkpoint(TINY_MODELS[name], folder)
    sizes: Any = {"max_model_len": 256, "max_num_seqs": 2, "mamba_block_size": 64}
    plan = LLM.plan(folder, skip_tokenizer_init=True, **sizes)
    assert (plan.num_state_slots, plan.num_state_snapshots) == (2, 2 * 4)
    reserved = str(plan).partition("reserved")[2].partition("\n")[0]
    assert "2 recurrent states, 8 copies of states" in reserved and ("blocks" in reserved) == (name != "mamba")
    assert plan.kv_cache_bytes == 10 * plan.state_bytes_per_request + 2 * 256 * plan.kv_bytes_per_token
    with open_llm(folder, skip_tokenizer_init=True, **sizes) as llm:
        assert_agrees(plan, llm, tolerance=0.15)
    without = LLM.plan(folder, skip_tokenizer_init=True, enable_prefix_caching=False, **sizes)
    assert without.kv_cache_bytes == plan.kv_cache_bytes - 8 * plan.state_bytes_per_request
    assert without.num_state_snapshots == 0 and "copies" not in str(without)


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_ranks_share_weights_and_memory(quantization: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments: Any = {"quantization": quantization, "max_model_len": 256, "max_num_seqs": 3}
    alone, plan = LLM.plan(**arguments), LLM.plan(tensor_parallel_size=2, **arguments)
    with open_llm(tensor_parallel_size=2, **arguments) as llm:
        assert_agrees(plan, llm, tolerance=0.03)  # kernels hold 1,056 rows of the vocabulary as 1,088
    assert plan.bytes_by_rank[0] == plan.weight_bytes < 0.6 * alone.weight_bytes and len(plan.bytes_by_rank) == 2
    assert alone.weight_bytes < sum(plan.bytes_by_rank) < 1.1 * alone.weight_bytes  # norms are whole on both
    assert plan.kv_bytes_per_token == alone.kv_bytes_per_token // 2
    assert plan.free_bytes == pytest.approx(alone.free_bytes / 2, rel=0.2)
    assert alone.bytes_by_rank == () and "\nranks " not in str(alone)
    scheme = ["--quantization", quantization] if quantization else []
    assert main(["plan", "--tensor-parallel-size", "2", *scheme]) == 0
    assert "ranks              2, each as follows; the weights of all take " in capsys.readouterr().out
    with pytest.raises(ValidationError, match="by 3 ranks"):
        LLM.plan(tensor_parallel_size=3)
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        LLM.plan(tensor_parallel_size=2, offload_weights=True)


def test_biases_are_counted_as_they_are_held(tmp_path: Path) -> None:
    """In float32 beside bf16 weights, where kernels compute; they pad none of these sizes, so every byte is counted."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "head_dim": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_checkpoint(TinyModel("Qwen2Config", {**sizes, **heads}, dtype=torch.bfloat16), tmp_path / "model")
    arguments: Any = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    plan = LLM.plan(tmp_path / "model", **arguments)
    with open_llm(tmp_path / "model", **arguments) as llm:
        assert_agrees(plan, llm)


def test_no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "stream", refuse)
    assert LLM.plan().fits
    with pytest.raises(AssertionError, match="a weight was read"):
        LLM(use_tqdm_on_load=False)


def test_as_many_sequences_fit_as_it_says() -> None:
    """So many run without being preempted, and one more does not."""
    arguments: Any = {"max_model_len": 64, "kv_cache_memory_bytes": 13 * 32768, "enable_prefix_caching": False}
    plan = LLM.plan(**arguments)
    assert plan.sequences == {64: 3}  # of four blocks each
    with open_llm(**arguments) as llm:
        assert_agrees(plan, llm)
        params = SamplingParams(temperature=0, max_tokens=54, ignore_eos=True)
        for rows, expected in ((3, False), (4, True)):
            outputs = run(llm, [[5 + index] * 10 for index in range(rows)], params)
            assert any(output.metrics.num_preemptions for output in outputs if output.metrics) is expected


def test_what_would_make_it_fit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: 5 * MIB)
    plan = LLM.plan(offload_weights=False)
    assert not plan.fits and plan.weight_bytes > 5 * MIB and plan.num_blocks == 0
    assert plan.change == {"quantization": "w8a8"} and "would fit with     quantization='w8a8'" in str(plan)
    with pytest.raises(OutOfMemoryError) as refused:
        LLM(offload_weights=False, use_tqdm_on_load=False)
    assert plan.why_not == str(refused.value)
    changed: Any = {"offload_weights": False, **plan.change}
    again = LLM.plan(**changed)
    assert again.fits
    with open_llm(**changed) as llm:
        assert_agrees(again, llm)
    if has_kernels():  # weights in a file are no fit, unless they are asked for
        assert LLM.plan().why_not == "weights would be read from a file, slowly"
        assert LLM.plan(offload_weights=True).fits
    else:  # nor do PyTorch's operations read any from a file
        assert LLM.plan().why_not == plan.why_not


@pytest.mark.parametrize("free", [9 * MIB, 12 * MIB, 30 * MIB])
def test_weights_and_cache_fit_together(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Of what is free, the cache gets what the weights leave."""
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: free)
    plan = LLM.plan(max_model_len=64, offload_weights=False)
    assert plan.fits and 0 < plan.kv_cache_bytes <= free - plan.weight_bytes
    with open_llm(max_model_len=64, offload_weights=False) as llm:
        cache = llm.config.cache_config
        assert cache.kv_cache_memory_bytes <= free - plan.weight_bytes


def test_a_shorter_sequence_is_tried_before_smaller_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: 7 * MIB)
    plan = LLM.plan(max_model_len=2048, offload_weights=False)
    assert not plan.fits and 0 < plan.change.pop("max_model_len") < 2048 and plan.change == {}
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: MIB)
    assert LLM.plan().change == {} and "nothing that was tried" in str(LLM.plan())


def test_a_quantized_checkpoint_is_about_as_large(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with open_llm(quantization="w4a16") as llm:
        llm.save_quantized(folder)
    plan = LLM.plan(folder, max_model_len=64)
    assert not plan.is_exact and plan.bytes_by_scheme == {} and "about" in str(plan)
    with open_llm(folder, max_model_len=64) as llm:
        assert_agrees(plan, llm, tolerance=0.25)


def test_speed_is_measured_only_when_asked_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setattr("llm.kernels.cpu.build.cache_folder", lambda: folder)
    assert LLM.plan().decode_tokens_per_second is None and "not measured" in str(LLM.plan())
    name, cores = CpuPlatform().get_device_name(), len(system.cores())
    measured = Calibration(name, cores, torch.get_num_threads(), Rate(1e9, 0.0, 5), Rate(1e12, 0.5, 5), None)
    monkeypatch.setattr("llm.tools.bench.machine.calibrate", lambda seconds: measured)
    for quantization in (None, "w4a16"):
        plan = LLM.plan(calibrate=True, quantization=quantization)
        assert plan.decode_tokens_per_second == pytest.approx(1e9 / plan.weight_bytes)  # the embedding is the LM head
        assert f"at most {plan.decode_tokens_per_second:,.1f} tokens/s" in str(plan)
        assert "GEMM rate varied by 50%" in str(plan)
        assert LLM.plan(quantization=quantization).to_dict() | FREE == plan.to_dict() | FREE
    alone = replace(measured, gemm=Rate(2e12, 0.0, 5))
    for newer, kept in ((alone, alone), (measured, alone)):  # what was disturbed does not replace what was not
        stored.keep(newer)
        assert stored.stored() == kept
    stored.keep(replace(alone, threads=77))
    assert stored.stored() == alone
    file = folder / "calibration.json"
    for text in ("[1]", "{", json.dumps({key: {"read": 3} for key in json.loads(file.read_text())})):
        good = file.read_text()
        file.write_text(text)
        assert stored.stored() is None
        file.write_text(good)
    folder.chmod(0o777)  # others could write to it
    assert stored.stored() is None


FREE = {"free_bytes": 0}


def test_wrong_arguments_are_refused_as_they_are_by_the_class() -> None:
    for arguments in ({"max_model_length": 5}, {"quantization": "w3"}, {"pipeline_parallel_size": 2}):
        with pytest.raises(ValidationError) as planned:
            LLM.plan(**arguments)  # type: ignore[arg-type]
        with pytest.raises(ValidationError) as loaded:
            LLM(**arguments)  # type: ignore[arg-type]
        assert str(planned.value) == str(loaded.value)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["plan", str(EMBEDDED_MODEL), "--max-model-len", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"]["128"] == 256
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: 5 * MIB)
    assert main(["plan"]) == 3
    assert "fits               no" in capsys.readouterr().out
