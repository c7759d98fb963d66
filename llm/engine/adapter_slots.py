"""Which adapters the running requests use, and which slot of the runner each is in.

Owns `Adapter`, how engine and runner name one, and `AdapterSlots`, the scheduler's policy. No tensors: the runner loads
an adapter into its slot when a row with it starts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from llm.inputs import LoRARequest

NO_SLOT = 0


@dataclass(frozen=True)
class Adapter:
    """An adapter whose files were checked against the model.

    Attributes:
        request: as the user named it.
        digest: of its files; adapters of equal digest are one, whatever their names are.
    """

    request: LoRARequest
    digest: str


class AdapterSlots:
    """`count` slots, numbered from 1; an adapter that no running request uses keeps its slot until it is needed."""

    def __init__(self, count: int) -> None:
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, the least recently used first
        self._users: Counter[str] = Counter()
        self._free = list(range(count, NO_SLOT, -1))

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether `take` has a slot for it."""
        return (
            adapter is None or adapter.digest in self._slots or bool(self._free) or len(self._users) < len(self._slots)
        )

    def take(self, adapter: Adapter | None) -> int:
        """The slot for one more request with this adapter; the caller has asked `has_room`."""
        if adapter is None:
            return NO_SLOT
        digest = adapter.digest
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
        self._slots[digest] = slot
        self._users[digest] += 1
        return slot

    def release(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._users[adapter.digest] -= 1
            if not self._users[adapter.digest]:
                del self._users[adapter.digest]

    def users(self) -> dict[str, int]:
        """Digest -> running requests."""
        return dict(self._users)

    def _evict(self) -> int:
        unused = next(digest for digest in self._slots if digest not in self._users)
        return self._slots.pop(unused)
