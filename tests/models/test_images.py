"""Families that read images answer as transformers does, and a picture's bits depend on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import images
import pytest

from llm import LLM

pytest.importorskip("PIL")
FAMILIES = ("llava", "idefics3", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """(family, folder, transformers' model)."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, images.write(request.param, folder)


def test_answers_are_those_of_transformers_and_do_not_depend_on_the_batch(made: tuple[str, Path, Any]) -> None:
    name, folder, model = made
    prompts = images.asked(name)
    with LLM(folder, use_tqdm_on_load=False) as llm:
        together = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            assert images.worst(llm, model, prompt, output) < images.TOLERANCE
        hit = llm.generate(prompts[1:], images.GREEDY.clone(), use_tqdm=False)
        assert [images.bits(output) for output in hit] == [images.bits(output) for output in together[1:]]
    with LLM(folder, use_tqdm_on_load=False, max_num_batched_tokens=13, enable_prefix_caching=False) as llm:
        for prompt, output in zip(prompts[1:], together[1:], strict=True):
            (alone,) = llm.generate(prompt, images.GREEDY, use_tqdm=False)
            assert images.bits(alone) == images.bits(output)
