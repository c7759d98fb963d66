"""Ranks on a device that only pretends to be one; see `kept_role.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pretend_device import QUEUE, PretendPlatform, pretend_device
from ranks import kept_role

import llm.platforms
from llm.kernels.backend import Backend
from llm.workers.connection import Connection

SCHEMA = kept_role.SCHEMA


@contextmanager
def pretending() -> Iterator[None]:
    """Within, `device="pretend"` is known and tensors can be made there."""
    with pytest.MonkeyPatch.context() as patch, pretend_device():
        patch.setattr(llm.platforms, "BUILTIN", (*llm.platforms.BUILTIN, PretendPlatform))
        patch.setattr(Backend, "_mark", lambda self: QUEUE.mark())
        yield


def serve(connection: Connection, number: int) -> None:
    with pretending():
        kept_role.serve(connection, number)
