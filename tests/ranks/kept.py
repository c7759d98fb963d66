"""Ranks whose processes are kept between `LLM`s, for tests that open many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from ranks.kept_role import SCHEMA

from llm.errors import WorkerDiedError
from llm.workers.messages import Message
from llm.workers.process import WorkerProcess


class KeptProcesses:
    """Processes by rank: an `LLM` gets one that no other has."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._free: dict[int, list[WorkerProcess]] = {}

    def worker(self, role: str, rank: int, schema: object, **options: Any) -> KeptWorker:
        """In the place of `WorkerProcess`."""
        assert role == "llm.setup.ranks" and set(options) == {"name", "folder"}
        free = self._free.setdefault(rank, [])
        process = free.pop() if free else WorkerProcess(self._role, rank, SCHEMA, name="rank")
        return KeptWorker(process, free)

    def close(self) -> None:
        for processes in self._free.values():
            for process in processes:
                process.close()


class KeptWorker:
    """A process for one `LLM`: closing it lets go of the model, and the process goes on."""

    def __init__(self, process: WorkerProcess, free: list[WorkerProcess]) -> None:
        self._process: WorkerProcess | None = process
        self._free = free
        self.pid, self.name, self.number = process.pid, process.name, process.number
        self.send, self.receive, self.kill = process.send, process.receive, process.kill
        self.call_at_end = process.call_at_end

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or not process.is_alive:
            return
        with suppress(WorkerDiedError):
            process.send("over")
            message: Message | None = None
            while message is None or message.kind != "over":
                message = process.receive()
            self._free.append(process)


@contextmanager
def kept_ranks(role: str = "ranks.kept_role") -> Iterator[None]:
    """Every `LLM` that is opened inside has its ranks in these processes."""
    processes = KeptProcesses(role)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.setup.ranks.WorkerProcess", processes.worker)
        try:
            yield
        finally:
            processes.close()
