"""Steps that a device computes while the host reads the tokens of the step before, and does what follows from them.

Of rows that sample in a step, the next one is known but for their tokens, and these are on the device. So it is started
before they are read. When its plan comes, some of its rows may have ended: theirs are dropped, and the others have the
bits that they have in any batch. What a dropped row wrote is behind the tokens of its blocks, where the next owner of
the block writes before it reads. What else is in the plan, such as the prompts of rows that are new, is computed after
it, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from llm.engine.step import SchedulerOutput
from llm.runner.batch import InputBatch
from llm.runner.logit_rows import Unread


@dataclass
class StepAhead:
    """A step that was started before its plan came.

    Attributes:
        request_ids: of its rows, in order.
        unread: what it samples; its batch rows are those of when it was started.
    """

    request_ids: list[str]
    unread: Unread

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
            and batch.num_computed[batch.index[name]] == self.unread.positions[row]
        }
        return dict(sorted(found.items()))

    def of(self, rows: dict[int, int], upload: Callable[[np.ndarray], torch.Tensor], is_all: bool) -> Unread:
        """What it samples for these of `rows_of`: tokens that no other step overwrites. `is_all`: these are all its
        rows, in order, and there is no other step."""
        unread, own = self.unread, list(rows.values())
        tokens = unread.tokens if is_all else unread.tokens.index_select(0, upload(np.array(own)))
        return Unread(np.array(list(rows)), unread.positions[own], tokens, lambda: unread.finish().of(own))


def in_order(parts: Sequence[Unread], upload: Callable[[np.ndarray], torch.Tensor]) -> tuple[np.ndarray, torch.Tensor]:
    """(positions, tokens on the device) of all of it, in the order of batch rows."""
    if len(parts) == 1:
        return parts[0].positions, parts[0].tokens
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    positions = np.concatenate([part.positions for part in parts])
    return positions[order], torch.cat([part.tokens for part in parts]).index_select(0, upload(order))


def without(plan: SchedulerOutput, request_ids: set[str]) -> SchedulerOutput:
    """The plan without the tokens of these requests."""
    counts = {name: count for name, count in plan.num_scheduled_tokens.items() if name not in request_ids}
    return replace(plan, num_scheduled_tokens=counts)
