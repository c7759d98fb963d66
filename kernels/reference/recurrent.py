"""The batch rows of a step, for operations that keep a state per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llm.forward import RecurrentMetadata


@dataclass(frozen=True)
class StateRow:
    """A batch row that has tokens in this step.

    Attributes:
        tokens: its tokens among the step's.
        stored: how many of them the stored state has seen.
        is_new: the first of them is at position 0.
    """

    slot: int
    tokens: slice
    stored: int
    is_new: bool


def state_rows(metadata: RecurrentMetadata, num_slots: int) -> Iterator[StateRow]:
    """IndexError: no such slot."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    ends = starts[1:]
    if metadata.counts is not None:
        ends = [start + count for start, count in zip(starts, metadata.counts.tolist(), strict=False)]
    counts = [end - start for start, end in zip(starts, ends, strict=False)]
    stored = counts if metadata.stored is None else metadata.stored.tolist()
    for row, slot in enumerate(metadata.slots.tolist()):
        if not 0 <= slot < num_slots:
            raise IndexError(f"slot {slot} does not exist: there are {num_slots}")
        if counts[row]:
            yield StateRow(slot, slice(starts[row], ends[row]), stored[row], lengths[row] == counts[row])
