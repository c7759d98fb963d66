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
    host = metadata.on_host()
    starts, lengths = host.starts, host.lengths
    ends = starts[1:]
    if host.counts is not None:
        ends = [start + count for start, count in zip(starts, host.counts, strict=False)]
    counts = [end - start for start, end in zip(starts, ends, strict=False)]
    stored = counts if host.stored is None else host.stored
    for row, slot in enumerate(host.slots):
        if not 0 <= slot < num_slots:
            raise IndexError(f"slot {slot} does not exist: there are {num_slots}")
        if counts[row]:
            yield StateRow(slot, slice(starts[row], ends[row]), stored[row], lengths[row] == counts[row])
