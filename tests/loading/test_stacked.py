"""Experts in one tensor or in one tensor each: the same model; and what does not fit is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_core")

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3-moe", tmp_path_factory)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers 5 has them in memory."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{path}.{expert}.{part}_proj.weight"] for expert in range(7)])
            for part in ("gate", "up", "down")
        )
        result |= {f"{path}.gate_up_proj": torch.cat((gate, up), dim=1), f"{path}.down_proj": down}
    return result


def rewritten(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def answers(folder: Path, **more: str) -> list[tuple[list[int], float | None]]:
    with LLM(folder, skip_tokenizer_init=True, **more) as llm:
        outputs = llm.generate(make_prompts(TINY_MODELS["qwen3-moe"])[:3], GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


def test_published_checkpoints_have_a_tensor_for_each_expert(folder: Path) -> None:
    assert f"{LAYER}.6.gate_proj.weight" in load_file(folder / "model.safetensors")


def test_stacked_experts_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    other = rewritten(folder, tmp_path / "stacked", stacked(load_file(folder / "model.safetensors")))
    assert answers(other) == answers(folder)
    assert answers(other, quantization="w8a8") == answers(folder, quantization="w8a8") != answers(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensor: tensor[:-1], rf"tensor {LAYER}.gate_up_proj has shape .*, the model has 7 experts"),
        (lambda tensor: tensor[:, :-2], rf"tensor {LAYER}.0.gate_proj.weight has shape"),
        (lambda tensor: tensor.flatten(), "the model has 7 experts"),
    ],
)
def test_a_stack_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, change, said: str) -> None:
    tensors = stacked(load_file(folder / "model.safetensors"))
    tensors[f"{LAYER}.gate_up_proj"] = change(tensors[f"{LAYER}.gate_up_proj"])
    with pytest.raises(CheckpointError, match=said):
        LLM(rewritten(folder, tmp_path / "wrong", tensors), skip_tokenizer_init=True)


def test_an_expert_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{LAYER}.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=rf"parameters that no tensor fills: {LAYER}.3.up_proj.weight"):
        LLM(rewritten(folder, tmp_path / "missing", tensors), skip_tokenizer_init=True)
