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
    """Processes by rank; a lost one is started anew."""

    def __init__(self) -> None:
        self._processes: dict[int, WorkerProcess] = {}

    def of(self, rank: int) -> WorkerProcess:
        known = self._processes.get(rank)
        if known is None or not known.is_alive:
            known = self._processes[rank] = WorkerProcess("ranks.kept_role", rank, SCHEMA, name="rank")
        return known

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def worker(self, role: str, rank: int, schema: object, **options: Any) -> KeptWorker:
        """In the place of `WorkerProcess`."""
        assert role == "llm.setup.ranks" and set(options) == {"name", "folder"}
        return KeptWorker(self.of(rank))


class KeptWorker:
    """A process for one `LLM`: closing it lets go of the model, and the process goes on."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process: WorkerProcess | None = process
        self.pid, self.name, self.number = process.pid, process.name, process.number
        self.send, self.receive, self.kill = process.send, process.receive, process.kill
        self.call_at_end = process.call_at_end

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or not process.is_alive:
            return
        message: Message | None = None
        with suppress(WorkerDiedError):
            process.send("over")
            while message is None or message.kind != "over":
                message = process.receive()


@contextmanager
def kept_ranks() -> Iterator[None]:
    """Every `LLM` that is opened inside has its ranks in these processes."""
    processes = KeptProcesses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.setup.ranks.WorkerProcess", processes.worker)
        try:
            yield
        finally:
            processes.close()
