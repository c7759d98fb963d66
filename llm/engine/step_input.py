"""A step's input: its tokens, and the lines whose logits it needs. `InputBatch` makes it, the runner computes it.

Owns no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llm.forward import ForwardBatch, RecurrentMetadata


@dataclass(frozen=True)
class Drafts:
    """The drafts that a step verifies.

    Attributes:
        firsts, ends: int64 [rows that sample], the indices of each one's first line and of that after its last.
        tokens: int64 [sampled lines], the draft for the token after each line; -1 at a row's last line.
    """

    firsts: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray


@dataclass
class Lines:
    """The (batch row, position) pairs whose logits a step needs, in the order of `ForwardBatch.logits_indices`.

    The first `num_sampled` lines are sampled, row by row: the row's last known token, then its drafts. A line after a
    draft counts only if that draft is accepted. The other lines are scored: they give the prompt logprob of the token
    after them.

    Attributes:
        rows, positions: int64 [L].
        drafts: None if every row that samples has one line.
    """

    rows: np.ndarray
    positions: np.ndarray
    num_sampled: int
    drafts: Drafts | None = None

    @property
    def sampled_rows(self) -> np.ndarray:
        """The rows that sample, each once."""
        return self.rows[: self.num_sampled] if self.drafts is None else self.rows[self.drafts.firsts]

    def num_drafts(self) -> np.ndarray:
        """int64, the number of drafts of each of `sampled_rows`."""
        if self.drafts is None:
            return np.zeros(self.num_sampled, dtype=np.int64)
        return self.drafts.ends - self.drafts.firsts - 1


@dataclass
class StepInput:
    """What `InputBatch.build` gives the runner.

    Attributes:
        rows: int64 [R], the batch row of each scheduled request, increasing.
        counts: int64 [R], its tokens this step, drafts included.
        recurrent: of the model's recurrent states; None: it has none.
    """

    rows: np.ndarray
    counts: np.ndarray
    lines: Lines
    forward_batch: ForwardBatch
    recurrent: RecurrentMetadata | None = None
