"""Ctrl-C during a call.

The SIGINT handler is installed only inside a call on the main thread, and the one before is restored after. The first
Ctrl-C sets a flag that is checked between steps. A second one raises at once. Later ones are ignored, because they
would interrupt the cleanup of the call.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_Handler = Callable[[int, FrameType | None], object] | int | None


class InterruptGuard:
    """Context manager; `requested` becomes True when the user presses Ctrl-C inside it.

    Args:
        terminable: SIGTERM counts as Ctrl-C.

    Attributes:
        signal: the number of the signal that came first; 0: none.
    """

    def __init__(self, terminable: bool = False) -> None:
        self.requested = False
        self.signal = 0
        self._ending = False
        self._defaults: dict[int, _Handler] = {signal.SIGINT: signal.default_int_handler}
        if terminable:
            self._defaults[signal.SIGTERM] = signal.SIG_DFL
        self._previous: dict[int, _Handler] = {}

    def end(self) -> None:
        """Called when the call is ending, because of `requested` or an error: from now on Ctrl-C is ignored."""
        self._ending = True

    def __enter__(self) -> InterruptGuard:
        # Python delivers signals to the main thread only, and installing a handler elsewhere is an error.
        if threading.current_thread() is threading.main_thread():
            for number, default in self._defaults.items():
                # A program that ignores the signal or has its own handler (None: not from Python) keeps it.
                if signal.getsignal(number) == default:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Raised while the guard leaves, it would leave this handler behind.
        is_leaving = frame is not None and frame.f_code is InterruptGuard.__exit__.__code__
        if self.requested and not self._ending and not is_leaving:
            self._ending = True
            raise KeyboardInterrupt
        self.requested = True
        self.signal = self.signal or number
