"""Steps that a device computes while the host reads the tokens of the step before, and does what follows from them.

Of a step in which every row samples, the next one is known but for its tokens, and these are on the device. So it is
started before they are read. When its plan comes, some of its rows may have ended: theirs are dropped, and the others
have the bits that they have in any batch. What a dropped row wrote is behind the tokens of its blocks, where the next
owner of the block writes before it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from llm.engine.step import SchedulerOutput
from llm.runner.batch import InputBatch
from llm.runner.logit_rows import Started


@dataclass
class StepAhead:
    """A step that was started before its plan came.

    Attributes:
        request_ids: of its rows, in order.
        positions: int64 [rows], of the tokens that it computes.
        started: what it samples.
    """

    request_ids: list[str]
    positions: np.ndarray
    started: Started

    def rows_of(self, plan: SchedulerOutput, batch: InputBatch) -> dict[int, int]:
        """Batch row -> row here, of the requests of which the plan computes the same, in the order of batch rows.

        `batch`: after the plan's changes. A request that comes back has other blocks.
        """
        counts, back = plan.num_scheduled_tokens, {new.request_id for new in plan.new_rows}
        found = {
            batch.index[name]: row
            for row, name in enumerate(self.request_ids)
            if counts.get(name) == 1
            and name not in back
            and batch.num_computed[batch.index[name]] == self.positions[row]
        }
        return dict(sorted(found.items()))

    def tokens_of(self, rows: list[int], upload: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor:
        """int64 [rows], what these rows sample, on the device."""
        tokens = self.started.tokens
        return tokens if rows == list(range(len(tokens))) else tokens.index_select(0, upload(np.array(rows)))


def without(plan: SchedulerOutput, request_ids: set[str]) -> SchedulerOutput:
    """The plan without the tokens of these requests."""
    counts = {name: count for name, count in plan.num_scheduled_tokens.items() if name not in request_ids}
    return replace(plan, num_scheduled_tokens=counts)
