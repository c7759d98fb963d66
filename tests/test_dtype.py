"""`dtype=` on a platform that computes in float32: the type in which matrices are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import engine_of
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, OutOfMemoryError
from llm.platforms.cpu import CpuPlatform

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
PROMPTS = make_prompts(TINY_MODELS["llama"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint."""
    return tiny_checkpoint("llama", tmp_path_factory)


def rewritten(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(
        {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}, target / "model.safetensors"
    )
    return target


def answers(folder: Path, **arguments: Any) -> tuple[Any, ...]:
    with LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", max_model_len=64, **arguments) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
        found = [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]
        named = engine_of(llm).runner.model.named_parameters()
        return found, {parameter.dtype for name, parameter in named if "norm" in name}, llm.config


@pytest.mark.parametrize("name, dtype", [("bfloat16", torch.bfloat16), ("half", torch.float16)])
def test_matrices_are_stored_as_asked(name: str, dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    ours, norms, config = answers(folder, dtype=name)
    cast = rewritten(folder, tmp_path / "cast", lambda _, tensor: tensor.to(dtype) if tensor.dim() > 1 else tensor)
    assert ours == answers(cast)[0]
    assert ours != answers(folder)[0]  # the rounding can be seen
    assert norms == {torch.float32}
    assert (config.model_config.dtype, config.model_config.weight_dtype) == (torch.float32, dtype)
    assert f"asked for by dtype={name}" in config.reasons["weight_dtype"]


def test_what_is_quantized_on_load_is_quantized_from_what_was_stored(folder: Path, tmp_path: Path) -> None:
    def cast_table(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if "embed_tokens" in name else tensor  # the one matrix that stays float

    cast = rewritten(folder, tmp_path / "cast", cast_table)
    assert answers(folder, quantization="w8a8", dtype="bfloat16")[0] == answers(cast, quantization="w8a8")[0]


def test_memory_is_planned_for_what_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: stored * 3 // 4)
    with pytest.raises(OutOfMemoryError, match="the weights take"):
        answers(folder, max_num_seqs=1)
    assert answers(folder, max_num_seqs=1, dtype="bfloat16")


def test_a_value_beyond_the_range_is_refused(folder: Path, tmp_path: Path) -> None:
    large = rewritten(folder, tmp_path / "large", lambda _, tensor: tensor * 1e6)
    with pytest.raises(CheckpointError, match=r"beyond the range of float16; use dtype='bfloat16'"):
        answers(large, dtype="float16")
