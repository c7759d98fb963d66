"""Fake proposers: they look the answer up in what an earlier run sampled, and draft it rightly, wrongly or in part.

A proposer checks on the way that it is told the truth about its drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from random import Random
from typing import Any

from embedded import engine_of

from llm import LLM
from llm.engine.step import SchedulerOutput
from llm.runner.batch import InputBatch
from llm.runner.speculation.proposer import ComputedStep, Proposer

KINDS = ("right", "wrong", "partly", "random")
MOST = 6  # drafts per row

Answers = dict[Any, list[int]]


def key_of(batch: InputBatch, row: int) -> Any:
    """What a row's answer depends on; a greedy row without a seed is given another one in every call."""
    params = batch.params[row]
    own = tuple(repr(getattr(params, item.name)) for item in fields(params) if not params.greedy or item.name != "seed")
    return tuple(batch.prompt_token_ids[row]), int(batch.sampling.sample_index[row]), own


class Recorder(Proposer):
    """Drafts nothing and keeps what the rows sample."""

    def __init__(self) -> None:
        self.answers: Answers = {}

    def propose(self, step: ComputedStep) -> Mapping[str, Sequence[int]]:
        for row in step.rows.tolist():
            self.answers[key_of(step.batch, row)] = list(step.batch.output_token_ids[row])
        return {}


class FakeProposer(Proposer):
    """Args:
    kind: "right": the next tokens; "wrong": none of them; "partly": some, then wrong ones; "random": any token.

    Attributes:
        drafted, accepted: tokens, as it was told.
        alive: the requests of the batch, as it was told.
    """

    def __init__(self, kind: str, answers: Answers, vocab_size: int, most: int = MOST) -> None:
        self.kind, self.answers, self.vocab_size, self.most = kind, answers, vocab_size, most
        self.random = Random(kind)
        self.drafted = self.accepted = 0
        self.alive: set[str] = set()
        self._drafts: dict[str, list[int]] = {}

    def update(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed:
            self.alive.discard(request_id)  # it may have left before this proposer came
            self._drafts.pop(request_id, None)
        self.alive |= {new.request_id for new in plan.new_rows}

    def propose(self, step: ComputedStep) -> Mapping[str, Sequence[int]]:
        batch = step.batch
        assert set(batch.request_ids) == self.alive
        assert len(step.hidden) == step.input.counts.sum()
        for row, num_drafts, num_sampled in zip(step.rows.tolist(), step.num_drafts, step.num_sampled, strict=True):
            known = batch.token_ids[row, : batch.num_tokens[row]].tolist()
            assert known == batch.prompt_token_ids[row] + batch.output_token_ids[row]
            self._check(self._drafts.pop(batch.request_ids[row], []), num_drafts, known[-num_sampled:])
        # Rows that did not sample may be in prefill, and are given drafts too.
        drafts = {request_id: self._draft(batch, row) for row, request_id in enumerate(batch.request_ids)}
        self._drafts |= drafts
        return drafts

    def reset(self) -> None:
        self.alive.clear()
        self._drafts.clear()

    def _check(self, drafts: list[int], num_drafts: int, sampled: list[int]) -> None:
        """The drafts up to the first wrong one were accepted, and no more were verified than were drafted."""
        assert num_drafts <= len(drafts)
        right = 0
        while right < num_drafts and drafts[right] == sampled[right]:
            right += 1
        assert len(sampled) == right + 1
        self.drafted += num_drafts
        self.accepted += right

    def _draft(self, batch: InputBatch, row: int) -> list[int]:
        done = len(batch.output_token_ids[row])
        answer = self.answers.get(key_of(batch, row), [])[done:]
        count = self.random.randint(0, self.most)
        if self.kind == "right":
            return answer[: self.most]
        if self.kind == "wrong":
            return [(token + 1) % self.vocab_size for token in answer[: self.most]]
        if self.kind == "random":
            return [self.random.randrange(self.vocab_size) for _ in range(count)]
        right = self.random.randint(0, count)
        return answer[:right] + [self.random.randrange(self.vocab_size) for _ in range(count - right)]


@contextmanager
def drafting(llm: LLM, proposer: Proposer | None) -> Iterator[Any]:
    runner = engine_of(llm).runner
    runner.proposer = proposer
    try:
        yield proposer
    finally:
        runner.proposer = None


def fake(llm: LLM, kind: str, answers: Answers) -> FakeProposer:
    return FakeProposer(kind, answers, llm.config.model_config.vocab_size)
