"""The communicators of the built-in platforms."""

from __future__ import annotations

import torch

from llm.errors import LLMError
from llm.kernels.select import backend_for
from llm.layers.parallel import Communicator, Rendezvous
from llm.platforms import select_platform


class SharedMemoryCommunicator(Communicator):
    """Of CPUs: processes of one machine, which map one file; nothing listens on an address.

    Raises:
        LLMError: there are no compiled kernels.
    """

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous) -> None:
        super().__init__(rank, size, rendezvous)
        backend = backend_for(select_platform("cpu")[0])
        memory = backend.shared_memory(rank, size, rendezvous.folder / "gathered", rendezvous.timeout_s)
        if memory is None:
            raise LLMError(f"ranks on CPUs need the compiled kernels: {backend.reason}.")
        self._memory = memory

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._memory.all_gather(x)

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        return self._memory.pick(x, owners)

    def abort(self) -> None:
        self._memory.abort()

    def restart(self) -> None:
        self._memory.restart()
