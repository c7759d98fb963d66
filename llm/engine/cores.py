"""Whether other programs used the cores of a call. Owns the one warning that says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("llm")


try:
    import resource

    _THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # only Linux counts per thread
except ImportError:  # not on Windows
    _THREAD = None

_LEAST_SECONDS = 2.0  # shorter calls are not judged
_FOUGHT_SHARE = 0.25  # at least this fraction of the call's time off the core ...
_FOUGHT_RATE = 5.0  # ... and this many involuntary switches per second; a thread that sleeps switches voluntarily
_has_warned = False


@contextmanager
def warn_of_busy_cores(threads: int) -> Iterator[None]:
    """Warn, once per process, if other programs ran on the cores of `threads` threads inside the context.

    No warning for one thread: it waits for no other thread, and there are no fewer threads to advise.
    """
    if _THREAD is None or threads == 1:
        yield
        return
    before = _taken_away(), time.thread_time(), time.perf_counter()
    yield
    seconds = time.perf_counter() - before[2]
    lost = seconds - (time.thread_time() - before[1])
    if has_fought(seconds, lost, _taken_away() - before[0]):
        _warn(lost / seconds, threads)


def has_fought(seconds: float, lost: float, taken_away: int) -> bool:
    """True if other programs ran on the cores of a call.

    Args:
        seconds: duration of the call.
        lost: seconds in which its thread did not run.
        taken_away: involuntary context switches of the thread.
    """
    return seconds >= _LEAST_SECONDS and lost >= _FOUGHT_SHARE * seconds and taken_away >= _FOUGHT_RATE * seconds


def _taken_away() -> int:
    return resource.getrusage(_THREAD).ru_nivcsw if _THREAD is not None else 0


def _warn(share: float, threads: int) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "other programs ran on this call's cores for %d%% of its time; it is faster without them, or with fewer "
            "threads than %d: LLM(num_threads=...).",
            round(100 * share),
            threads,
        )
