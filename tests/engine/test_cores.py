"""A call that others' programs took the cores from is told of, once; one that waits for something else is not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time

import pytest

from llm.engine import stats as cores

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")


def test_what_counts_as_a_fight() -> None:
    assert cores.has_fought(4.0, 2.0, 400)
    assert not cores.has_fought(4.0, 0.5, 400)  # it had its core nearly all the time
    assert not cores.has_fought(4.0, 2.0, 3)  # it slept
    assert not cores.has_fought(0.5, 0.3, 400)  # too short to say


def spin() -> None:
    while True:
        pass


@needs_linux
def test_one_warning_on_a_shared_core(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Against three busy processes on one core; asleep beside them, or with one thread, it says nothing."""
    monkeypatch.setattr(cores, "_has_warned", False)
    monkeypatch.setattr(cores, "_LEAST_SECONDS", 0.5)
    allowed = os.sched_getaffinity(0)
    others = [multiprocessing.get_context("fork").Process(target=spin, daemon=True) for _ in range(3)]
    try:
        os.sched_setaffinity(0, {min(allowed)})
        for other in others:
            other.start()
        with caplog.at_level(logging.WARNING, logger="llm"):
            with cores.warn_of_busy_cores(2):
                time.sleep(1)
            assert not caplog.records
            for threads in (1, 2, 2):
                with cores.warn_of_busy_cores(threads):
                    deadline = time.monotonic() + 1
                    while time.monotonic() < deadline:
                        pass
                assert len(caplog.records) == (threads > 1)
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            if other.is_alive():
                other.kill()
                other.join()
    assert len(caplog.records) == 1
    assert "num_threads" in caplog.text
