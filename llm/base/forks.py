"""What a forked process does about the other threads of its parent, which it has not.

A fork copies every lock, and of the threads only the one that forks: a lock that another one held would never be
released. Registering is for good, and weak.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar

Lock = TypeVar("Lock")


class Forked(Protocol):
    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""


_locks: weakref.WeakSet[object] = weakref.WeakSet()
_told: weakref.WeakSet[Forked] = weakref.WeakSet()


def renewed_in_children(lock: Lock) -> Lock:
    """A `threading.Lock` or `RLock` that is free in a child: what it protects is whole between any two bytecodes."""
    _locks.add(lock)
    return lock


def tell_of_forks(what: Forked) -> None:
    _told.add(what)


def renew(lock: object) -> bool:
    """In a child: free a lock that another thread of the parent held. True if one did."""
    is_owned = getattr(lock, "_is_owned", None)
    if is_owned is not None and is_owned():  # by the thread that forked, inside a callback
        return False
    was_held = not getattr(lock, "acquire")(blocking=False)  # noqa: B009
    getattr(lock, "_at_fork_reinit")()  # noqa: B009
    return was_held


def _after_fork() -> None:
    for lock in list(_locks):
        renew(lock)
    for what in list(_told):
        what.after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_after_fork)
