"""The interfaces of a proposer, which drafts tokens for the runner to verify, and of this library's sources of drafts.

A proposer belongs to the runner and lives in its process. It may have weights and a KV cache on the device (a draft
model), read the hidden states that the step has just computed (multi-token prediction, EAGLE), or look at the tokens
only (n-grams, the forced tokens of a grammar). Its drafts leave as plain data in `RunnerOutput.draft_token_ids`. The
scheduler plans as many of them as budget, length and free KV blocks allow, and the next step verifies those. Drafts
change no answer, only the number of steps. How many tokens to draft for which row is up to the proposer, which learns
how many were accepted.

A step, as a proposer sees it:
 1. `update(plan)` before the forward: which rows left the batch, which came or were resumed;
 2. `looks(batch)` after it: whether it wants to see the step;
 3. `propose(step)` if so: the computed tokens, their hidden states, and what was sampled.
`reset()` follows a step that failed: the batch is empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.runner.batch import InputBatch, StepInput


@dataclass(frozen=True)
class ComputedStep:
    """A step that has been computed and sampled.

    Attributes:
        batch: its rows as they are now, read only: `token_ids[row, :num_tokens[row]]` is all that is known of a row,
            `params[row]` its parameters. A row may have ended with its last token; the next plan says so.
        rows: int64 [R], the batch rows that sampled without an error.
        num_drafts: int64 [R], how many drafts of each were verified.
        num_sampled: int64 [R], how many tokens each sampled: the accepted drafts and one more.
        input: the computed tokens, with block tables and slots of the target model.
        hidden: float [N, H], the target's last hidden states of all computed tokens, chunks of prompts included;
            overwritten by the next step.
        seconds: time of the step's forward, LM head and sampler.
    """

    batch: InputBatch
    rows: np.ndarray
    num_drafts: np.ndarray
    num_sampled: np.ndarray
    input: StepInput
    hidden: torch.Tensor
    seconds: float


class Proposer(ABC):
    """Drafts tokens for the rows of one runner."""

    def update(self, plan: SchedulerOutput) -> None:
        """Follow the batch: `plan.removed` have left, `plan.new_rows` have come, new or after a preemption."""

    def looks(self, batch: InputBatch) -> bool:
        """Called after every step. False: the step is not described to `propose`, and no row gets new drafts.

        `batch`: its rows after the step, read only.
        """
        return True

    @abstractmethod
    def propose(self, step: ComputedStep) -> Mapping[str, Sequence[int]]:
        """Request id -> drafts of the tokens that follow its last known one.

        Called after every step that it looks at, whether a row sampled or not. Drafts wait until a step computes the
        last known token of their request (a row may be in prefill, or not be scheduled), unless new ones replace them.
        A request that is absent keeps those it has.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every row."""

    def close(self) -> None:
        """Free weights and caches."""


def propose(
    proposer: Proposer,
    batch: InputBatch,
    step: StepInput,
    hidden: torch.Tensor,
    result: RunnerOutput,
    vocab_size: int,
    seconds: float,
) -> dict[str, list[int]]:
    """The drafts for the next step, `seconds` after the beginning of this one.

    Raises:
        ValueError: a draft is for no row of the batch, or no token of the vocabulary, or the model has recurrent
            states that are not rolled back.
    """
    # Describing a step takes tens of microseconds, a few percent of a small model's.
    if not proposer.looks(batch):
        return {}
    drafts = proposer.propose(_computed_step(batch, step, hidden, result, seconds))
    if not drafts:
        return {}
    name = type(proposer).__name__
    if not batch.takes_drafts and any(drafts.values()):
        raise ValueError(f"{name}.propose drafted for a model with recurrent states, which cannot be rolled back.")
    for request_id, tokens in drafts.items():
        if request_id not in batch.index:
            raise ValueError(f"{name}.propose drafted for {request_id!r}, which is no request of the batch.")
        if any(not 0 <= token < vocab_size for token in tokens):
            raise ValueError(f"{name}.propose drafted {list(tokens)}; token ids are below {vocab_size}.")
    return {request_id: list(tokens) for request_id, tokens in drafts.items()}


def _computed_step(
    batch: InputBatch, step: StepInput, hidden: torch.Tensor, result: RunnerOutput, seconds: float
) -> ComputedStep:
    rows, num_drafts = step.logit_rows.sampled_rows, step.logit_rows.num_drafts()
    if step.logit_rows.drafts is None and not result.errors:
        return ComputedStep(batch, rows, num_drafts, num_drafts + 1, step, hidden, seconds)
    request_ids = [batch.request_ids[row] for row in rows.tolist()]
    good = np.array([request_id not in result.errors for request_id in request_ids], dtype=bool)
    sampled = np.array([len(result.sampled_token_ids.get(name, ())) for name in request_ids], dtype=np.int64)
    return ComputedStep(batch, rows[good], num_drafts[good], sampled[good], step, hidden, seconds)


@dataclass(frozen=True)
class Offer:
    """What a source can draft for a row.

    Attributes:
        most: number of tokens.
        kind: drafts of one kind are accepted about equally often.
    """

    most: int
    kind: str


class Source(ABC):
    """Drafts tokens for the rows of a batch. A row is known by its request id."""

    #: Seconds that a draft costs besides its logit row in the next step.
    seconds_per_draft = 0.0
    #: It must see every step.
    follows = False

    def observe(self, step: ComputedStep) -> None:
        """A step has been computed; `offer` and `draft` may follow."""

    @abstractmethod
    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        """What can be drafted after the row's last known token, at most `most` tokens; None: nothing."""
        raise NotImplementedError

    @abstractmethod
    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """Row -> drafts, for rows that were offered at least `counts[row]` tokens since the last step."""
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        """The request has left the batch; it may come back."""

    def reset(self) -> None:
        """Forget every request."""

    def close(self) -> None:
        """Free weights and caches."""
