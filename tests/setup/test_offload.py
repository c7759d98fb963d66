"""Weights that memory has no room for: from a file, the same bits; and what is refused.

`offload.py` beside it is the run in a real control group.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of
from kernel_sets import has_kernels
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.base import system
from llm.errors import OutOfMemoryError, ValidationError
from llm.layers.linear import ColumnParallelLinear
from llm.loading import weight_file
from llm.loading.loader import EarlyPacking
from llm.loading.weight_file import WeightFile, check_folder
from llm.platforms.cpu import CpuPlatform
from llm.quantization.unquantized import UnquantizedLinearMethod
from llm.setup.memory import resident_weight_bytes

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
PROMPTS = make_prompts(TINY_MODELS["qwen3-moe"])
needs_files = pytest.mark.skipif(
    not (has_kernels() and system.deletes_open_files()),
    reason="PyTorch's operations keep weights in memory, and so does Windows; tests say that they refuse",
)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return tiny_checkpoint("qwen3-moe", tmp_path_factory)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Several parts, tensors of some kilobytes moved, and a folder that has to be empty in the end."""
    for name, value in (("_PART", 1 << 15), ("_UNWRITTEN", 1 << 14), ("_SMALL", 256)):
        monkeypatch.setattr(weight_file, name, value)
    monkeypatch.setenv("LLM_OFFLOAD_FOLDER", str(tmp_path / "weights"))
    yield tmp_path / "weights"
    assert not list((tmp_path / "weights").glob("*"))
    assert all("/weights-" not in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob or 0.0) for output in outputs]


def run(folder: Path, **arguments: Any) -> list[tuple[list[int], float]]:
    with LLM(folder, **OPTIONS, **arguments) as llm:
        return answers(llm)


def in_file(llm: LLM) -> list[torch.Tensor]:
    """The model's tensors in a private mapping of a file."""
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/weights-" in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in mapped]
    model = engine_of(llm).runner.model
    tensors = [*model.parameters(), *model.buffers()]
    return [each for each in tensors if any(start <= each.data_ptr() < end for start, end in ranges)]


@needs_files
@pytest.mark.parametrize("quantization", [None, "w8a8", "w4a16"])
def test_a_file_changes_no_bit_and_is_gone_at_the_end(folder: Path, quantization: str | None) -> None:
    expected = run(folder, quantization=quantization, offload_weights=False)
    with LLM(folder, **OPTIONS, quantization=quantization, offload_weights=True) as llm:
        held = in_file(llm)
        assert len(held) > 20
        assert answers(llm) == expected
        del held
    assert run(folder, quantization=quantization, offload_weights=False) == expected


@needs_files
def test_what_does_not_fit_is_moved_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, small_parts: Path
) -> None:
    expected = run(folder)
    free = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 3 // 4
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: free)
    monkeypatch.setattr("llm.setup.memory._LEAST_HEADROOM", 0)
    with caplog.at_level(logging.WARNING, "llm"), LLM(folder, **OPTIONS) as llm:
        assert answers(llm) == expected
        text, explained = str(llm.config), str(llm.explain())
        plan = llm.config.offload_config
        resident, planned = plan.resident_weight_bytes, plan.planned_weight_bytes
        moved = sum(tensor.nbytes for tensor in in_file(llm))
    assert 0 < resident < free < planned
    assert f"{moved:,} in a file" in text
    assert f"{moved:,} in a file" in explained
    assert planned - resident <= moved < planned
    (record,) = [record for record in caplog.records if "weights are kept in a file" in record.message]
    assert str(small_parts) in record.message


def test_where_they_fit_nothing_is_moved(folder: Path) -> None:
    with LLM(folder, **OPTIONS) as llm:
        assert not in_file(llm)
        assert "offload_weights          False  (they fit into memory)" in str(llm.config)
        assert "offload_weights" not in str(llm.explain())


@needs_files
def test_random_weights_are_the_same(folder: Path) -> None:
    expected = run(folder, load_format="dummy")
    assert run(folder, load_format="dummy", offload_weights=True) == expected


@needs_files
def test_a_weight_in_the_file_can_be_changed(folder: Path) -> None:
    expected = run(folder)
    with LLM(folder, **OPTIONS, offload_weights=True) as llm:
        llm.apply_model(lambda model: [parameter.mul_(2) for parameter in model.parameters()])
        assert answers(llm) != expected
        assert in_file(llm)


def test_what_cannot_be_moved_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="offload_weights must be True, False, or None"):
        LLM(folder, offload_weights="yes")  # type: ignore[arg-type]
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        check_folder(tmp_path / "a" / "b", 1 << 60)
    check_folder(tmp_path / "a" / "b", 1 << 10)
    if Path("/dev/shm").exists():
        with pytest.raises(OutOfMemoryError, match=r"is memory itself \(tmpfs\)"):
            check_folder(Path("/dev/shm/weights"), 1)


@needs_files
def test_a_full_disk_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfMemoryError, match="No space left on device"):
        run(folder, offload_weights=True)


def test_plain_operations_keep_weights_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_CPU_ISA", "none")
    with pytest.raises(ValidationError, match="offload_weights must be None or False"):
        run(folder, offload_weights=True)


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "weights", 5000)
    values = torch.arange(4096, dtype=torch.float32).view(32, 128)
    scale = torch.rand(300, 3).t().contiguous().t()
    kept, moved, transposed = file.keep("a", values[:8].clone()), file.keep("b", values), file.keep("c", scale)
    assert (file.in_memory, file.in_file) == (4096, values.nbytes + scale.nbytes)
    file.close()
    assert torch.equal(moved, values)
    assert torch.equal(transposed, scale)
    assert transposed.stride() == scale.stride()
    assert torch.equal(kept, values[:8])
    file.fetch([kept, moved, transposed])
    assert moved._base is None


def test_experts_have_room_beside_everything_else(tmp_path: Path) -> None:
    file, model = WeightFile(tmp_path / "weights", 6000), torch.nn.Module()
    model.dense = torch.nn.Parameter(torch.zeros(1000))
    model.add_module("experts", torch.nn.ModuleList([torch.nn.Linear(100, 10, bias=False) for _ in range(3)]))
    model = torch.nn.Sequential(model)
    file.divide(model, 16_000)
    assert (file._room, file._expert_room) == (4000, 2000)
    file.keep("0.experts.1", torch.zeros(750))
    assert file.in_file == 3000
    file.keep("0.dense", torch.zeros(1000))
    assert (file.in_memory, file.in_file) == (4000, 3000)
    file.close()


def test_a_layer_is_packed_once_and_with_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []
    monkeypatch.setattr(
        UnquantizedLinearMethod, "process_weights_after_loading", lambda self, layer: packed.append(layer.prefix)
    )
    model = torch.nn.Sequential(
        *(ColumnParallelLinear(4, 4, bias=True, prefix=str(index), return_bias=False) for index in range(2))
    )
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    early = EarlyPacking(model, sizes)
    early.filled("1.weight", sizes)
    early.filled("0.bias", sizes)
    assert packed == []
    for _ in range(2):
        early.filled("1.bias", sizes)
    assert packed == ["1"]
    assert early.packed == {model[1]}


def test_resident_bytes_leave_room() -> None:
    gib = 1 << 30
    assert resident_weight_bytes(16 * gib, 4 * gib, gib) == 8 * gib
    assert resident_weight_bytes(gib, gib // 4, gib) == 0
