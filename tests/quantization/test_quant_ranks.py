"""Checkpoints of every format over two ranks, each of which reads its part: the bits of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from embedded import open_llm
from kernel_sets import needs_kernels
from ranks.kept import kept_ranks
from ranks.matrix import evened
from same_answers import Answer, told
from test_quant_floats import DEEPSEEK, LLAMA, PROMPTS, fp8_pair
from test_quant_words import CASES, GREEDY, ROW, quantized
from tiny_models import make_prompts, one_thread, write_checkpoint

from llm.errors import UnsupportedModelError

pytestmark = needs_kernels


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    with one_thread(), kept_ranks():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "float"
    write_checkpoint(ROW, folder)
    return folder


def answers(path: Path, size: int) -> list[Answer]:
    with open_llm(path, skip_tokenizer_init=True, tensor_parallel_size=size) as llm:
        prompts = [*PROMPTS, *({"prompt_token_ids": list(ids)} for ids in make_prompts(ROW))]
        return told(llm.generate(prompts, GREEDY, use_tqdm=False))


def saved(scheme: object, format: str) -> Callable[[Path, Path], Path]:
    def write(source: Path, folder: Path) -> Path:
        with open_llm(source, skip_tokenizer_init=True, quantization=scheme) as llm:
            return llm.save_quantized(folder / ("saved.gguf" if format == "gguf" else "saved"), format)

    return write


def words(name: str) -> Callable[[Path, Path], Path]:
    def write(source: Path, folder: Path) -> Path:
        description, choose, file = CASES[name]
        quantized(source, folder / "words", description, choose, file)
        return folder / "words"

    return write


def fp8(source: Path, folder: Path) -> Path:
    write_checkpoint(LLAMA, folder / "float")
    return fp8_pair(folder / "float", folder, (16, 24), "weight_scale_inv")[0]


def fp8_latent(source: Path, folder: Path) -> Path:
    write_checkpoint(evened(DEEPSEEK), folder / "float")
    return fp8_pair(folder / "float", folder, (16, 24), "weight_scale_inv")[0]


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    **{name: words(name) for name in ("gptq-4", "gptq-8-head", "gptq-act-order", "awq")},
    "fp8": fp8,
    "fp8-latent": fp8_latent,
    "compressed-tensors-w8a8": saved("w8a8", "compressed-tensors"),
    "compressed-tensors-w4a16": saved({"scheme": "w4a16", "group_size": 32}, "compressed-tensors"),
    "compressed-tensors-fp8": saved("fp8", "compressed-tensors"),
    "modelslim-w8a8": saved({"scheme": "w8a8", "rotate": False, "symmetric": True}, "modelslim"),
    "gguf-q8_0": saved("q8_0", "gguf"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_two_ranks_have_the_bits_of_one(name: str, source: Path, tmp_path: Path) -> None:
    path = WRITERS[name](source, tmp_path)
    found = answers(path, 1)
    assert len({str(answer) for answer in found}) == len(found)  # a constant would agree as well
    assert answers(path, 2) == found


def test_blocks_across_rows_are_refused(source: Path, tmp_path: Path) -> None:
    path = saved("nf4", "bitsandbytes")(source, tmp_path)
    with pytest.raises(UnsupportedModelError, match="cannot be divided by ranks"):
        answers(path, 2)
