"""A lock that a thread which takes it again and again leaves to the others in between.

Apart because it is no part of forks or threads: `LLM` has one for its calls, and a thread that steps for asyncio.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

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
