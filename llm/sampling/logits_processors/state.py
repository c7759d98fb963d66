"""The builder of `BatchUpdate`s, and per-row state that follows the updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llm.sampling.logits_processors.interface import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
    RemovedRequest,
)
from llm.sampling_params import SamplingParams

T = TypeVar("T")


class BatchUpdateBuilder:
    """Collects the changes of the batch in one step.

    All removals of a step are registered first. Once they have been read, further removals are refused, because new
    rows may have taken the empty indices.

    Attributes:
        added, moved: lists to append to.
        batch_changed: True if a row was removed, added or moved in this step.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._removed = removed or []
        self._is_sorted = False
        self.added = added or []
        self.moved = moved or []
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """Removed rows, the highest first."""
        if not self._is_sorted:
            self._removed.sort(reverse=True)
            self._is_sorted = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Register a removal; RuntimeError once removals have been read in this step."""
        if self._is_sorted:
            raise RuntimeError("Cannot register new removed request after self.removed has been read.")
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The lowest empty index, None if there is none."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Take the lowest empty index; None if there is none."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Clear the step; return True if anything had changed."""
        changed = self.batch_changed or bool(self._removed or self.added or self.moved)
        self._clear()
        return changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the step's update, None if nothing changed, and clear the builder."""
        if not (self._removed or self.added or self.moved):
            self._clear()
            return None
        update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self._clear()
        return update

    def _clear(self) -> None:
        # New lists: a `BatchUpdate` returned earlier keeps the old ones.
        self._removed, self.added, self.moved = [], [], []
        self._is_sorted = False
        self.batch_changed = False


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply a batch update to a dict from batch row to state.

    Args:
        req_entries: changed in place; rows without state are absent.
        new_state: (params, prompt token ids, live output token ids) -> the state of a new row, or None.

    Returns:
        True if `req_entries` changed.
    """
    if not batch_update:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        changed |= req_entries.pop(row, None) is not None
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            req_entries[row] = state
            changed = True
    for source, target, direction in batch_update.moved:
        moving, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        changed |= moving is not None or replaced is not None
        if moving is not None:
            req_entries[target] = moving
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return changed
