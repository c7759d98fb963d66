"""Settings every test shares: the Hypothesis profiles, seeds, Ctrl-C.

Under CI the examples are derived from each test's name, so a red run is red again on the next machine; elsewhere they
are random. No deadline in either: the suite asserts nothing about wall-clock time. Imports nothing heavy.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def draws_of_its_own(request: pytest.FixtureRequest) -> None:
    """What a test draws without a seed depends on its name alone, not on the tests before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """PyTorch and the kernels compute on one thread: tiny models gain nothing from more threads, which wait."""
    from tiny_models import one_thread

    with one_thread():
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler of Ctrl-C, here and in child processes: shells start background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
