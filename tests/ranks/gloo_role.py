"""Ranks on CPUs that gather as GPUs do, through a process group, whose backend is gloo; see `kept_role.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from ranks import kept_role
from torch.distributed import ProcessGroupGloo

from llm.layers.communicators import ProcessGroupCommunicator
from llm.platforms.cpu import CpuPlatform
from llm.workers.connection import Connection

SCHEMA = kept_role.SCHEMA


class GlooCommunicator(ProcessGroupCommunicator):
    medium = "gloo"
    is_recorded = False  # by the kernels of CPUs, which this is none of
    needs_own_device = False

    def make_group(self, store: Any) -> Any:
        return ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self._timeout_s))


@contextmanager
def over_gloo() -> Iterator[None]:
    """Within, ranks on CPUs gather through gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "get_communicator_cls", lambda self: f"{__name__}.GlooCommunicator")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield


def serve(connection: Connection, number: int) -> None:
    with over_gloo():
        kept_role.serve(connection, number)
