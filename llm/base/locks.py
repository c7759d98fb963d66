"""Locks: free again in a forked process, and fair to those who wait.

A fork copies every lock, and of the threads only the one that forks: a lock that another one held would never be
released. Registering is for good, and weak.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

from llm.base import system

Lock = TypeVar("Lock")


class Forked(Protocol):
    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""


_locks: weakref.WeakSet[object] = weakref.WeakSet()
_notified: weakref.WeakSet[Forked] = weakref.WeakSet()


def renewed_in_children(lock: Lock) -> Lock:
    """A `threading.Lock` or `RLock` that is free in a child: what it protects is whole between any two bytecodes."""
    _locks.add(lock)
    return lock


def tell_of_forks(what: Forked) -> None:
    _notified.add(what)


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
    for what in list(_notified):
        what.after_fork()


system.after_fork(_after_fork)


if TYPE_CHECKING:

    class RLock:
        """With what typeshed leaves out."""

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
        def release(self) -> None: ...
        def __enter__(self) -> bool: ...
        def __exit__(self, *exception: object) -> None: ...
        def _is_owned(self) -> bool: ...
        def _at_fork_reinit(self) -> None: ...

else:
    from _thread import RLock


class FairLock(RLock):
    """As `threading.RLock`; whoever waits comes before the thread that has just released it.

    A plain lock goes to whoever asks first after its release, and that is the thread that released it: it runs, while
    the one that waits must be woken. Here a thread waits while it holds `_next`, which the others need before they ask.
    Leaving `with` is Python's own, in C: no signal comes in between.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking or self._is_owned():
            return super().acquire(blocking, timeout)
        with self._next:
            return super().acquire(blocking, timeout)

    def __enter__(self) -> bool:
        was_owned = self._is_owned()
        try:
            return self.acquire()
        except BaseException:  # a signal's, maybe after the lock was acquired
            if self._is_owned() and not was_owned:
                self.release()
            raise

    def _at_fork_reinit(self) -> None:
        super()._at_fork_reinit()
        self._next = threading.Lock()
