"""Who drafts tokens: the interface between the runner and a proposer.

A proposer stands in the runner, on its side of the boundary: it may have weights and a KV cache on the device (a draft
model), read the hidden states of the step that has just been computed (multi-token prediction, EAGLE), or look at
nothing but the rows' tokens (n-grams, the forced tokens of a grammar). Its drafts leave as plain data in
`RunnerOutput.draft_token_ids`; the scheduler plans as many as budget, length and free blocks allow, and the next step
verifies them. What is drafted changes no answer, only the number of steps. How many tokens to draft for which row is
the proposer's to say; it is told what became of them.

A step, as a proposer sees it:
 1. `update(plan)`, before the forward, once the batch has changed: which rows left, came or were resumed;
 2. `propose(step)`, after it, if any row drew: what was drawn, and where the tokens lie.
`reset()` follows a step that failed: all rows are gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm.engine.batch import InputBatch, StepInput
from llm.engine.step import RunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class DrawnStep:
    """What came of a step.

    Attributes:
        batch: the rows as they are now, to be read only: `token_ids[row, :num_tokens[row]]` is all that is known of a
            row, `params[row]` what it asked for. A row may have ended by what it drew; that is told in the next plan.
        rows: int64 [R], the batch rows that drew and had no error, in the order of `StepInput.lines`.
        num_drafts: int64 [R], how many drafts of each were verified.
        num_drawn: int64 [R], how many tokens each drew: the accepted drafts and, nearly always, one more.
        input: the tokens that were computed, with block tables and slots of the target model.
        hidden: float [N, H], the target's last hidden states of all of them; overwritten by the next step.
    """

    batch: InputBatch
    rows: np.ndarray
    num_drafts: np.ndarray
    num_drawn: np.ndarray
    input: StepInput
    hidden: torch.Tensor


class Proposer(ABC):
    """Drafts tokens for the rows of one runner."""

    def update(self, plan: SchedulerOutput) -> None:
        """Follow the rows: `plan.removed` have left, `plan.new_rows` have come, new or after a preemption."""

    @abstractmethod
    def propose(self, step: DrawnStep) -> Mapping[str, Sequence[int]]:
        """Request id -> the tokens that may follow all that is known of it; none for those left out."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every row."""

    def close(self) -> None:
        """Let go of everything large."""


def propose(
    proposer: Proposer, batch: InputBatch, step: StepInput, hidden: torch.Tensor, result: RunnerOutput, vocab_size: int
) -> dict[str, list[int]]:
    """The drafts for the next step.

    Raises:
        ValueError: a draft is for no row of the batch, or no token of the vocabulary, or the model has recurrent
            states, from which a rejected draft cannot be taken back.
    """
    drafts = proposer.propose(_drawn_step(batch, step, hidden, result))
    name = type(proposer).__name__
    if batch.has_slots and any(drafts.values()):
        raise ValueError(f"{name}.propose drafted for a model with recurrent states, which cannot be rolled back.")
    for request_id, tokens in drafts.items():
        if request_id not in batch.index:
            raise ValueError(f"{name}.propose drafted for {request_id!r}, which is no request of the batch.")
        if any(not 0 <= token < vocab_size for token in tokens):
            raise ValueError(f"{name}.propose drafted {list(tokens)}; token ids are below {vocab_size}.")
    return {request_id: list(tokens) for request_id, tokens in drafts.items() if tokens}


def _drawn_step(batch: InputBatch, step: StepInput, hidden: torch.Tensor, result: RunnerOutput) -> DrawnStep:
    rows, num_drafts = step.lines.sampled_rows, step.lines.num_drafts()
    request_ids = [batch.request_ids[row] for row in rows.tolist()]
    good = np.array([request_id not in result.errors for request_id in request_ids])
    drawn = np.array([len(result.sampled_token_ids.get(request_id, ())) for request_id in request_ids])
    return DrawnStep(batch, rows[good], num_drafts[good], drawn[good], step, hidden)
