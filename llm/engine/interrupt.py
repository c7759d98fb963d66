"""Ctrl-C during a call.

Owns the SIGINT handler, which is installed only inside a call on the main thread and restored after. The first Ctrl-C
sets a flag that is checked between steps. A second one raises at once. Later ones are ignored, because they would
interrupt the cleanup of the call.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptGuard:
    """Context manager; `requested` becomes True when the user presses Ctrl-C inside it."""

    def __init__(self) -> None:
        self.requested = False
        self._ending = False
        self._previous: Any = None
        self._installed = False

    def end(self) -> None:
        """Called when the call is ending, because of `requested` or an error: from now on Ctrl-C is ignored."""
        self._ending = True

    def __enter__(self) -> InterruptGuard:
        # Python delivers signals to the main thread only, and installing a handler elsewhere is an error.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            # A program that ignores SIGINT or has its own handler (None: not from Python) keeps it.
            if previous is signal.default_int_handler:
                self._previous = signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and not self._ending:
            self._ending = True
            raise KeyboardInterrupt
        self.requested = True
