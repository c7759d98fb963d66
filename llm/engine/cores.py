"""Whether a call had its cores to itself. Owns the one warning that says it had not."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("llm")


try:
    import resource

    _THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # Linux alone counts by thread
except ImportError:  # not on Windows
    _THREAD = None

_LEAST_SECONDS = 2.0  # shorter calls say little
_FOUGHT_SHARE = 0.25  # of a call's time without a core ...
_FOUGHT_RATE = 5.0  # ... and so many times a second taken from it, where a thread that sleeps gives it up
_has_warned = False


@contextmanager
def warn_of_busy_cores(threads: int) -> Iterator[None]:
    """Warn, once a process, when other programs ran on the cores of what `threads` compute meanwhile.

    One thread is not told of it: it waits for no other, and cannot be made less.
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
    """Whether others ran on the cores of a call.

    Args:
        seconds: how long it took.
        lost: seconds of these that its thread did not run.
        taken_away: how often the system took the core from the thread (involuntary context switches).
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
