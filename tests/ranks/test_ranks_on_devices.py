"""Ranks on devices: by way of the host on one that pretends to be a device, and through a process group."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import PROMPTS, assert_idle, engine_of, interrupt, open_llm, run
from kernel_sets import needs_kernels
from ranks.gloo_role import over_gloo
from ranks.kept import kept_ranks
from ranks.matrix import answers, evened
from ranks.pretend_role import pretending
from tiny_models import TINY_MODELS, make_prompts, one_thread, write_checkpoint
from workers.test_workers import is_gone

from llm import LLM, SamplingParams, WorkerDiedError
from llm.layers.communicators import HostCommunicator

pytestmark = needs_kernels


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# --- By way of the host. ---


@pytest.fixture(scope="module")
def pretend() -> Iterator[None]:
    with kept_ranks("ranks.pretend_role"), pretending():
        yield


TWO: dict[str, Any] = {"devices": ["pretend", "pretend"], "tensor_parallel_size": 2}


@pytest.mark.parametrize("name", ["mixtral+bfloat16", "deepseek-v3+float32"])
def test_two_ranks_on_a_device_have_the_bits_of_one(pretend: None, name: str, tmp_path: Path) -> None:
    name, _, dtype = name.partition("+")
    row = evened(TINY_MODELS[name])
    write_checkpoint(row, tmp_path)
    prompts = make_prompts(row)
    alone = answers(tmp_path, row, prompts, device="pretend", dtype=dtype)
    assert answers(tmp_path, row, prompts, dtype=dtype, **TWO) == alone


def test_ranks_say_where_they_are_and_others_bits_are_seen(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = evened(TINY_MODELS["mixtral"])
    write_checkpoint(row, tmp_path)
    prompts = make_prompts(row)[:2]
    with open_llm(tmp_path, skip_tokenizer_init=True, **TWO) as llm:
        config = llm.config
    assert config.reasons["tensor_parallel_size"] == (
        "on pretend, pretend; they gather through the host's memory, which is slower than between devices"
    )
    assert not config.scheduler_config.async_scheduling
    alone = answers(tmp_path, row, prompts, device="pretend", dtype="bfloat16")
    gather = HostCommunicator.all_gather
    monkeypatch.setattr(
        HostCommunicator, "all_gather", lambda self, x: torch.cat(gather(self, x).chunk(2, -1)[::-1], -1)
    )
    assert answers(tmp_path, row, prompts, dtype="bfloat16", **TWO) != alone


# --- Through a process group. ---


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with kept_ranks("ranks.gloo_role"), over_gloo(), open_llm(tensor_parallel_size=2) as opened:
        yield opened


SAMPLED = SamplingParams(temperature=0.9, seed=1, max_tokens=9, logprobs=2, prompt_logprobs=0)


def told(llm: LLM) -> list[Any]:
    return [
        (item.prompt_logprobs, item.outputs[0].token_ids, item.outputs[0].logprobs)
        for item in run(llm, PROMPTS, SAMPLED)
    ]


def test_a_process_group_gives_the_bits_of_one_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step that rank 0 leaves, and after it."""
    with open_llm() as alone:
        expected = told(alone)
    assert "gather through gloo" in llm.config.reasons["tensor_parallel_size"]
    assert told(llm) == expected
    interrupt(llm, monkeypatch)
    assert told(llm) == expected
    assert_idle(llm)


def test_a_process_group_ends_with_a_rank_that_is_killed(llm: LLM) -> None:
    group = engine_of(llm).runner.group
    os.kill(group._workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"rank 1 died.*SIGKILL"):
        run(llm, PROMPTS)
    assert is_gone(group._workers[0].pid)
