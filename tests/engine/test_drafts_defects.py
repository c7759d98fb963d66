"""Negative controls of `test_drafts_verified.py`: the defects that verification invites are seen by its comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from embedded import PROMPTS, engine_of, open_llm
from same_answers import CACHE
from test_drafts_verified import SCHEMA, Opened, Workload, assert_same, second_turns

from llm import SamplingParams, StructuredOutputsParams
from llm.engine.block_manager import BlockManager
from llm.engine.request import Request
from llm.engine.scheduler import Scheduler
from llm.runner import logit_rows
from llm.runner.batch import InputBatch
from llm.runner.logit_rows import LogitRowReader
from llm.sampling.logits_processors.builtin import PenaltiesLogitsProcessor
from llm.sampling.structured.processor import StructuredOutputsLogitsProcessor


@pytest.fixture(scope="module")
def small() -> Iterator[Opened]:
    """What the controls need: a few requests, small blocks."""
    with open_llm(**CACHE, block_size=4, max_num_seqs=6) as llm:
        yield Opened(llm, small_workload())


def small_workload() -> Workload:
    own: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "frequency_penalty": 1.5, "repetition_penalty": 1.5},
        {"temperature": 0, "presence_penalty": 1.5},
        {"seed": 3, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"seed": 4, "n": 2},
    ]
    params = [SamplingParams(**{"max_tokens": 24, "logprobs": 2, **item}) for item in own]
    return [PROMPTS[index % 3] for index in range(len(own))], params


Plant = Callable[[pytest.MonkeyPatch], None]


def one_wrong_draft_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(drafts: Any, current: np.ndarray, sampled: Any) -> np.ndarray:
        return current[drafts.tokens[current] >= 0] + 1

    monkeypatch.setattr(logit_rows, "_accepted", planted)


def the_line_after_a_right_draft_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = logit_rows._accepted

    def planted(drafts: Any, current: np.ndarray, sampled: Any) -> np.ndarray:
        after = accepted(drafts, current, sampled)
        return np.where(drafts.tokens[after] >= 0, after + 1, after)

    monkeypatch.setattr(logit_rows, "_accepted", planted)


def every_line_samples_with_the_first_one_s_number(monkeypatch: pytest.MonkeyPatch) -> None:
    add = InputBatch._add_drafts

    def planted(self: InputBatch, own: Any, *rest: Any) -> np.ndarray:
        indices = add(self, own, *rest)
        own.positions = self.num_tokens[own.rows] - 1
        return indices

    monkeypatch.setattr(InputBatch, "_add_drafts", planted)


def _see_drafts(monkeypatch: pytest.MonkeyPatch, look: Callable[[LogitRowReader], None]) -> None:
    """A processor looks at the output lists while the drafts are in them."""
    verify = LogitRowReader._verify_in_rounds

    def planted(self: LogitRowReader, hidden: torch.Tensor, own: Any, drafts: Any, result: Any) -> None:
        tokens = drafts.tokens
        for logit_row in np.flatnonzero(tokens >= 0):
            self.batch.output_token_ids[own.rows[logit_row]].append(int(tokens[logit_row]))
        look(self)
        for logit_row in np.flatnonzero(tokens >= 0):
            self.batch.output_token_ids[own.rows[logit_row]].pop()
        verify(self, hidden, own, drafts, result)

    monkeypatch.setattr(LogitRowReader, "_verify_in_rounds", planted)


def drafts_are_left_in_the_counts_of_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(reader: LogitRowReader) -> None:
        for processor in reader.processors.all:
            if isinstance(processor, PenaltiesLogitsProcessor):
                for seen in processor.rows.values():
                    seen.catch_up()

    _see_drafts(monkeypatch, look)


def drafts_are_left_in_the_state_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(reader: LogitRowReader) -> None:
        for processor in reader.processors.all:
            if isinstance(processor, StructuredOutputsLogitsProcessor):
                for row in processor._rows.values():
                    row.allowed = None
                    row.compute()

    _see_drafts(monkeypatch, look)


def processors_are_not_told_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: LogitRowReader, *rest: Any) -> None:
        self.processors.update_state, kept = (lambda update, drafts: None), self.processors.update_state
        try:
            verify(self, *rest)
        finally:
            self.processors.update_state = kept

    verify = LogitRowReader._verify_in_rounds
    monkeypatch.setattr(LogitRowReader, "_verify_in_rounds", planted)


def rejected_tokens_count_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update_from_output

    def planted(self: Scheduler, plan: Any, result: Any) -> int:
        accepted = update(self, plan, result)
        for request_id in plan.draft_token_ids:
            self.requests[request_id].num_computed_tokens -= 1
        return accepted

    monkeypatch.setattr(Scheduler, "update_from_output", planted)


def the_runner_keeps_a_block_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = InputBatch.settle

    def planted(self: InputBatch, step: Any) -> None:
        kept = self.num_blocks.copy()
        settle(self, step)
        self.num_blocks[:] = kept

    monkeypatch.setattr(InputBatch, "settle", planted)


def the_scheduler_keeps_a_block_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "trim", lambda self, request: None)


def a_block_is_taken_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = BlockManager.trim

    def planted(self: BlockManager, request: Request) -> None:
        trim(self, request)
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.release(blocks.pop())

    monkeypatch.setattr(BlockManager, "trim", planted)


PLANTS: list[tuple[Plant, str]] = [
    (one_wrong_draft_is_accepted, "wrong"),
    (the_line_after_a_right_draft_is_left_out, "right"),
    (every_line_samples_with_the_first_one_s_number, "right"),
    (drafts_are_left_in_the_counts_of_penalties, "partly"),
    (drafts_are_left_in_the_state_of_grammars, "partly"),
    (processors_are_not_told_between_rounds, "right"),
    (rejected_tokens_count_as_computed, "partly"),
    (the_runner_keeps_a_block_of_drafts, "wrong"),
    (the_scheduler_keeps_a_block_of_drafts, "wrong"),
    (a_block_is_taken_back_early, "partly"),
]


@pytest.mark.parametrize(("plant", "kind"), PLANTS, ids=lambda item: getattr(item, "__name__", item))
def test_planted_defects_are_seen(small: Opened, plant: Plant, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(small.plain, small.drafted(kind)[0])
    plant(monkeypatch)
    # A kernel may refuse a block that is not there, and the books may not balance.
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(small.plain, small.drafted(kind)[0])
    engine_of(small.llm).reset()


def test_a_cached_hash_over_a_rejected_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are promised to the prefix cache; the block they shared with known tokens is then written over."""
    plain = second_turns(None)
    assert_same(plain, second_turns("wrong"))
    schedule = Scheduler._schedule

    def planted(self: Scheduler, plan: Any, request: Request, count: int, drafts: int = 0) -> None:
        known = request.token_ids
        request.token_ids = known + plan.draft_token_ids.get(request.request_id, [])
        schedule(self, plan, request, count)
        request.token_ids = known

    monkeypatch.setattr(Scheduler, "_schedule", planted)
    with pytest.raises(AssertionError):
        assert_same(plain, second_turns("wrong"))
