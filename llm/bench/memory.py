"""The process's private memory: the current size, and the peak between two marks.

Owns reading /proc; without it there are no figures. Private memory (RssAnon) excludes file mappings: pages of a mapped
checkpoint count only if they were copied.
"""

from __future__ import annotations

import threading
from pathlib import Path

# Long enough to cost a thousandth of the time, short enough to sample within a step of a large model.
_SAMPLE_SECONDS = 0.02
_STATUS = Path("/proc/self/status")


def private_bytes() -> int | None:
    """Current anonymous memory (RssAnon); None without /proc."""
    if not _STATUS.exists():
        return None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Context manager: a thread samples private memory."""

    def __init__(self) -> None:
        self._peak = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peak memory")

    def take(self) -> int | None:
        """The peak since the last `take`, in bytes; None: unknown."""
        now = private_bytes()
        peak, self._peak = self._peak, 0
        return None if now is None else max(peak, now)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, private_bytes() or 0)
