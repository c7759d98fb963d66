"""Batch rows of a step for tests of operations that keep a state per request."""

from __future__ import annotations

import torch

from llm.forward import RecurrentMetadata


def rows(*of: tuple[int, int, int]) -> RecurrentMetadata:
    """The metadata of batch rows (slot, tokens of earlier steps, tokens of this one)."""
    slots, done, counts = (list(column) for column in zip(*of, strict=True))
    lengths = [before + count for before, count in zip(done, counts, strict=True)]
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    return RecurrentMetadata(
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        counts,
        lengths,
    )
