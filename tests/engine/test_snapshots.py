"""Prefix caching with recurrent states: a prefix is shared up to a snapshot, and no answer changes by a bit."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafts import FakeProposer, Recorder, drafting
from embedded import engine_of
from kernel_sets import has_kernels
from tiny_models import one_thread, tiny_checkpoint

from llm import LLM, RequestOutput, SamplingParams
from llm.engine.block_manager import BlockPool, StateSnapshots
from llm.errors import ValidationError

pytestmark = pytest.mark.skipif(not has_kernels(), reason="PyTorch rounds by the batch's size")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
PREFIX = [3 + 7 * i % 250 for i in range(27)]
OTHER = [200 - 3 * i for i in range(30)]
# Prefix and tail: a hit at a snapshot, between two, behind the last, and a prompt that ends at one.
PROMPTS = [[*PREFIX, 9], [*PREFIX[:16], 8, 7], [*PREFIX[:21], 5], PREFIX[:24], PREFIX + OTHER, OTHER, PREFIX[:7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with one_thread():
        yield tiny_checkpoint("lfm2", tmp_path_factory)


def load(folder: Path, **more: Any) -> LLM:
    arguments = {"mamba_block_size": 8, "block_size": 4, "max_model_len": 64, "max_num_seqs": 3, **more}
    return LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", **arguments)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    engine_of(llm).scheduler.check_integrity()
    return [_answer(output) for output in outputs]


def _answer(output: RequestOutput) -> list[Any]:
    return [(item.token_ids, item.cumulative_logprob, item.logprobs) for item in output.outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    with load(folder, enable_prefix_caching=False) as llm:
        assert llm.config.cache_config.num_state_snapshots == 0
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


def cached(llm: LLM, prompt: list[int]) -> int:
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens or 0


def test_hits_end_at_snapshots_and_change_nothing(folder: Path, alone: list[Any]) -> None:
    with load(folder) as llm:
        cache = llm.config.cache_config
        assert cache.enable_prefix_caching and cache.mamba_block_size == 8 and cache.num_state_snapshots == 3 * 8
        assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == alone
        assert [cached(llm, prompt) for prompt in PROMPTS] == [24, 16, 16, 16, 56, 24, 0]
        assert answers(llm, PROMPTS) == alone and answers(llm, PROMPTS[::-1]) == alone[::-1]
        llm.reset_prefix_cache()
        assert cached(llm, PROMPTS[0]) == 0 and cached(llm, PROMPTS[0]) == 24


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 3},
        {"kv_cache_memory_bytes": 24_000},  # few blocks: they are evicted, and requests preempted
        {"max_num_seqs": 1, "enable_chunked_prefill": False},
    ],
)
def test_no_schedule_shows(folder: Path, alone: list[Any], settings: dict[str, Any]) -> None:
    with load(folder, **settings) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == alone
        several = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=9, ignore_eos=True)
        first = answers(llm, PROMPTS[:2], several)
        llm.reset_prefix_cache()
        assert answers(llm, PROMPTS[1::-1], several) == first[::-1]


def test_drafts_skip_no_snapshot(folder: Path) -> None:
    """An answer is found in the cache as far as without drafts, at any place of the drafts before a snapshot."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with load(folder) as llm:
        with drafting(llm, recorder := Recorder()):
            (expected,) = llm.generate([PREFIX[:7]], params, use_tqdm=False)
        tokens = PREFIX[:7] + expected.outputs[0].token_ids
        assert cached(llm, tokens) == 32
        for most in (1, 2, 5):
            llm.reset_prefix_cache()
            with drafting(llm, FakeProposer("right", recorder.answers, 256, most)) as proposer:
                assert llm.generate([PREFIX[:7]], params, use_tqdm=False)[0].outputs[0].token_ids == tokens[7:]
            assert cached(llm, tokens) == 32
            assert proposer.accepted == proposer.drafted > 0


def late(copy: Callable[..., None]) -> Callable[..., None]:
    """Copies of this step's states are made after the next step's forward pass."""
    waiting: list[Any] = []

    def delayed(slots: Any) -> None:
        if isinstance(slots, list):
            copy(waiting[-1] if waiting else [])
            waiting.append(slots)
        else:
            copy(slots)

    return delayed


def test_a_snapshot_one_step_late_is_seen(folder: Path, alone: list[Any]) -> None:
    with load(folder) as llm:
        runner: Any = engine_of(llm).runner
        runner._copy_states = late(runner._copy_states)
        for prompt in PROMPTS:
            answers(llm, [prompt])
        assert answers(llm, PROMPTS) != alone


def test_states_that_are_not_restored_are_seen(folder: Path, alone: list[Any]) -> None:
    with load(folder) as llm:
        runner: Any = engine_of(llm).runner
        copy = runner._copy_states
        runner._copy_states = lambda slots: copy(slots if isinstance(slots, list) else [])
        for prompt in PROMPTS:
            answers(llm, [prompt])
        assert answers(llm, PROMPTS) != alone


def test_the_interval_is_a_multiple_of_a_block(folder: Path) -> None:
    with pytest.raises(ValidationError, match="mamba_block_size must be a multiple of block_size=4, got 6"):
        load(folder, mamba_block_size=6)
    with load(folder, mamba_block_size=None, max_model_len=200) as llm:
        assert llm.config.cache_config.mamba_block_size == 128
        assert "mamba_block_size" in llm.config.reasons["enable_prefix_caching"]
    with load(folder, mamba_block_size=None, max_model_len=127) as llm:
        assert not llm.config.cache_config.enable_prefix_caching
        assert "long enough" in llm.config.reasons["enable_prefix_caching"]


def test_snapshots_go_with_their_blocks_and_oldest_first() -> None:
    snapshots, pool = StateSnapshots(2, 8, 5), BlockPool(3)
    pool.on_forget = snapshots.drop
    names = [bytes([i]) for i in range(4)]
    tokens = array("q", [1]).tobytes()
    assert snapshots.take(names[0], tokens) == 5 and snapshots.find(names[0], tokens) == -1
    snapshots.commit()
    assert snapshots.find(names[0], tokens) == 5 and snapshots.take(names[0], tokens) == -1
    assert snapshots.find(names[0], b"other") == -1
    assert snapshots.take(names[1], tokens) == 6 and snapshots.take(names[2], tokens) == 5  # the oldest goes
    assert snapshots.take(names[3], tokens) == -1, "all are being written"
    snapshots.commit()
    snapshots.check_integrity()
    (block,) = pool.allocate(1)
    pool.remember(block, names[1], tokens)
    pool.release(block)
    pool.allocate(2)  # the cached block is reused
    assert snapshots.find(names[1], tokens) == -1 and snapshots.find(names[2], tokens) == 5
    snapshots.check_integrity()
