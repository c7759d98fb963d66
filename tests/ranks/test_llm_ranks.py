"""`LLM(tensor_parallel_size=2)`: the bits of one process, whatever is asked for; and how a group of ranks ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import Recorder, drafting, fake
from embedded import PROMPTS, assert_idle, engine_of, open_llm, run
from kernel_sets import needs_kernels
from ranks.kept import kept_ranks
from ranks.matrix import answers, evened
from tiny_models import TINY_MODELS, make_prompts, one_thread, write_checkpoint
from workers.test_workers import is_gone

from llm import LLM, RankError, SamplingParams, ValidationError, WorkerDiedError
from llm.layers.communicators import SharedMemoryCommunicator
from llm.runner.model_runner import ModelRunner
from llm.sampling_params import StructuredOutputsParams

pytestmark = needs_kernels


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    with one_thread(), kept_ranks():
        yield


# One of each kind of layer, of cache, and of embedding.
FAMILIES = [
    "llama-biases-one-kv-head",
    "gemma2",
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "minicpm3",
    "falcon-h1",
    "qwen3-next",
]


@pytest.mark.parametrize("name", [*FAMILIES, "llama+w4a16", "qwen2-bf16+w8a8"])
def test_two_ranks_have_the_bits_of_one(name: str, tmp_path: Path) -> None:
    name, _, scheme = name.partition("+")
    row, options = evened(TINY_MODELS[name]), {"quantization": scheme} if scheme else {}
    write_checkpoint(row, tmp_path)
    prompts = make_prompts(row)
    assert answers(tmp_path, row, prompts, tensor_parallel_size=2, **options) == answers(
        tmp_path, row, prompts, **options
    )


def test_recurrent_states_follow_accepted_drafts_and_shared_prefixes(tmp_path: Path) -> None:
    row = evened(TINY_MODELS["falcon-h1"])
    write_checkpoint(replace(row, config={**row.config, "max_position_embeddings": 512}), tmp_path)
    prompts = [[5, 6, 7, 8, 9, 10] * 40 + [last] for last in (11, 12)] + [[20, 21] * 30]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
    found, recorder = [], Recorder()
    for size in (1, 2):
        with open_llm(tmp_path, skip_tokenizer_init=True, tensor_parallel_size=size, max_num_seqs=2) as llm:
            outputs = []
            with drafting(llm, recorder if size == 1 else fake(llm, "partly", recorder.answers)) as proposer:
                for _ in range(2):
                    outputs += run(llm, [{"prompt_token_ids": ids} for ids in prompts], params)
            assert llm.stats().cached_tokens and (size == 1 or 0 < proposer.accepted < proposer.drafted)
            found.append([(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in outputs])
    assert found[0] == found[1]


def test_vectors_of_two_ranks(tmp_path: Path) -> None:
    vectors = []
    for size in (1, 2):
        with open_llm(task="embed", max_model_len=64, tensor_parallel_size=size) as llm:
            vectors.append([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
    assert vectors[0] == vectors[1]


@pytest.fixture(scope="module")
def llm(_kept: None) -> Iterator[LLM]:
    with open_llm(**OPTIONS, tensor_parallel_size=2) as llm:
        yield llm


OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "speculative_config": {"method": "ngram"}}
ASKED: dict[str, tuple[Any, SamplingParams]] = {
    "sampled": (PROMPTS, SamplingParams(temperature=0.9, seed=1, max_tokens=9, logprobs=2, prompt_logprobs=0)),
    "several": (PROMPTS[0], SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=9)),
    "shared prefix": ([PROMPTS[1] * 8, PROMPTS[1] * 8 + " so"], SamplingParams(temperature=0, max_tokens=5)),
    "drafts": ("a b c d " * 12, SamplingParams(temperature=0, max_tokens=20, logprobs=1)),
    "structure": (
        PROMPTS[0],
        SamplingParams(seed=5, max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")),
    ),
    "penalties": (PROMPTS[2], SamplingParams(temperature=0, max_tokens=6, presence_penalty=1, logit_bias={9: 2.0})),
}


def told(llm: LLM, name: str) -> list[Any]:
    return [
        (output.prompt_logprobs, [(item.token_ids, item.text, item.logprobs) for item in output.outputs])
        for output in run(llm, *ASKED[name])
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    with open_llm(**OPTIONS) as alone:
        return {name: told(alone, name) for name in ASKED}


@pytest.mark.parametrize("name", ASKED)
def test_whatever_is_asked(llm: LLM, expected: dict[str, list[Any]], name: str) -> None:
    assert told(llm, name) == expected[name]
    assert_idle(llm)


def test_a_rank_that_gathers_in_another_order_is_caught(
    llm: LLM, expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""

    def swapped(self: SharedMemoryCommunicator, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._memory.all_gather(x).chunk(2, -1)[::-1], -1)

    monkeypatch.setattr(SharedMemoryCommunicator, "all_gather", swapped)
    monkeypatch.setattr("llm.runner.recorded.RecordedSteps.is_watched", True)
    assert told(llm, "sampled") != expected["sampled"]


def test_a_step_that_fails_on_rank_0_is_left_by_all(
    llm: LLM, expected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a second Ctrl-C does: rank 1 waits in the step that rank 0 never finishes, and computes the next call."""

    def interrupted(self: ModelRunner, batch: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS)
    assert told(llm, "sampled") == expected["sampled"]
    assert_idle(llm)


def test_what_one_rank_cannot_do_is_refused(llm: LLM, tmp_path: Path) -> None:
    for ask in (
        lambda: llm.apply_model(lambda model: None),
        lambda: llm.save_quantized(tmp_path / "saved"),
        lambda: LLM(tensor_parallel_size=2, calibration=["text"], quantization="w4a16"),
        lambda: LLM(tensor_parallel_size=2, offload_weights=True),
        lambda: LLM(tensor_parallel_size=2, enable_lora=True),
        lambda: LLM(tensor_parallel_size=2, speculative_config={"method": "mtp"}),
        lambda: LLM(tensor_parallel_size=2, data_parallel_size=2),
        lambda: LLM(tensor_parallel_size=2, hf_overrides=lambda config: config),
    ):
        with pytest.raises(ValidationError, match="tensor_parallel_size"):
            ask()
    with pytest.raises(ValidationError, match=r"layers\.0\.self_attn\.qkv_proj.* by 3 ranks"):
        LLM(tensor_parallel_size=3)
    assert_idle(llm)


def test_a_rank_that_is_killed_ends_the_call_with_its_number() -> None:
    with open_llm(tensor_parallel_size=2) as llm:
        pid = engine_of(llm).runner.group._workers[0].pid
        stopper = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        stopper.start()
        with pytest.raises(WorkerDiedError, match=r"rank 1 died.*SIGKILL"):
            while True:
                run(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        stopper.join()
        with pytest.raises(WorkerDiedError, match="rank 1"):
            run(llm, PROMPTS)
        assert is_gone(pid)


def test_a_rank_that_hangs_is_ended() -> None:
    with open_llm(tensor_parallel_size=2) as llm:
        runner = engine_of(llm).runner
        runner.tp.communicator._memory._timeout_s = 1.0  # not by LLM_WORKER_TIMEOUT, which is also that of a start
        pid = runner.group._workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="rank 1 did not come to a step within 1 seconds, and was ended"):
            run(llm, PROMPTS)
        assert is_gone(pid)
