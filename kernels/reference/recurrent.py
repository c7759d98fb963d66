"""The batch rows of a step, for operations that keep a state per request."""

from __future__ import annotations

from collections.abc import Iterator

from llm.forward import RecurrentMetadata


def state_rows(metadata: RecurrentMetadata, num_slots: int) -> Iterator[tuple[int, slice, bool]]:
    """(slot, tokens, True if the first of them is at position 0) of each row; IndexError: no such slot."""
    first = 0
    for slot, count, length in zip(
        metadata.slots.tolist(), metadata.query_lens_list, metadata.seq_lens_list, strict=True
    ):
        if not 0 <= slot < num_slots:
            raise IndexError(f"slot {slot} does not exist: there are {num_slots}")
        yield slot, slice(first, first + count), length == count
        first += count
