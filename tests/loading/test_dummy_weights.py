"""`load_format="dummy"`: random weights for every form that a checkpoint's tensors have, repeatable, and finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.modelslim import ModelSlimFolder, write_modelslim
from checkpoints.vllm import W8A8, write_vllm_checkpoint
from embedded import open_llm

from llm import LLM, SamplingParams
from llm.cli import main

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0, detokenize=False, ignore_eos=True)


def modelslim(kind: str, version: str, group_size: int = 0) -> Callable[[Path, Path], Path]:
    def write(source: Path, folder: Path) -> Path:
        how = ModelSlimFolder(
            lambda module: kind if module.endswith("_proj") else "FLOAT", version=version, group_size=group_size
        )
        write_modelslim(source, folder, how)
        return folder

    return write


def saved(recipe: str) -> Callable[[Path, Path], Path]:
    def write(source: Path, folder: Path) -> Path:
        with LLM(source, skip_tokenizer_init=True, quantization=recipe) as llm:
            llm.save_quantized(folder)
        return folder

    return write


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "float": lambda source, folder: source,
    "int-quantized": lambda source, folder: write_vllm_checkpoint(W8A8, folder),
    "pack-quantized": saved("w4a16"),
    "modelslim-static": modelslim("W8A8", "0.9"),
    "modelslim-dynamic": modelslim("W8A8_DYNAMIC", "1.0.0"),
    "modelslim-int4-pairs": modelslim("W4A8_DYNAMIC", "1.0.0"),
    "modelslim-int4": modelslim("W4A8_DYNAMIC", "0.9", group_size=16),
}


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_of_every_format(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = FORMATS[name](write_vllm_checkpoint("llama", tmp_path / "float"), tmp_path / "model")
    answers = []
    for seed in (1, 1, 2):
        with open_llm(folder, load_format="dummy", skip_tokenizer_init=True, seed=seed) as llm:
            output = llm.generate([3, 4, 5], GREEDY, use_tqdm=False)[0].outputs[0]
            answers.append(output.cumulative_logprob)
            schemes = {part.runs for part in llm.explain().parts if part.kind == "quant method"}
    assert answers[0] == answers[1] != answers[2]
    assert (schemes == {"unquantized"}) == (name == "float")
    capsys.readouterr()
    assert main(["explain", str(folder), "--dummy"]) == 0
    assert schemes <= set(capsys.readouterr().out.split())


def test_explain_of_a_model_quantized_on_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--dummy", "--quantization", "w8a8"]) == 0
    assert "W8A8_DYNAMIC" in capsys.readouterr().out
