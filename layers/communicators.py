"""What ranks gather through: memory that processes on CPUs share, that memory for devices too, and NCCL between GPUs.

`communicator_cls` says which. All of them move bits and compute nothing.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import numpy as np
import torch

from llm.errors import LLMError, RankError
from llm.kernels.backend import Backend
from llm.kernels.select import backend_for
from llm.layers.parallel import Communicator, Rendezvous
from llm.platforms import select_platform
from llm.platforms.interface import Platform
from llm.plugins import load_class

if TYPE_CHECKING:  # some builds of PyTorch have none of it
    from torch.distributed import Store

_POLL_SECONDS = 0.02
# That ending a group may take when this object is closed.
_END_SECONDS = 5.0


def communicator_cls(platform: Platform, shares_device: bool = False) -> type[Communicator]:
    """The platform's; where ranks share a device and it cannot serve them, `HostCommunicator`."""
    who = f"{type(platform).__name__}.get_communicator_cls"
    cls: type[Communicator] = load_class(platform.get_communicator_cls(), Communicator, who, platform.plugin)
    return HostCommunicator if shares_device and cls.needs_own_device else cls


class SharedMemoryCommunicator(Communicator):
    """Of CPUs: processes of one machine, which map one file; nothing listens on an address.

    Raises:
        LLMError: there are no compiled kernels.
    """

    medium = "memory that the ranks share"

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, platform: Platform) -> None:
        super().__init__(rank, size, rendezvous, platform)
        backend = backend_for(select_platform("cpu")[0])
        memory = backend.shared_memory(rank, size, rendezvous.folder / "gathered", rendezvous.timeout_s)
        if memory is None:
            raise LLMError(f"ranks gather by the compiled kernels of CPUs: {backend.reason}.")
        self._memory = memory

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._memory.all_gather(x)

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        return self._memory.pick(x, owners)

    def abort(self) -> None:
        self._memory.abort()

    def restart(self) -> None:
        self._memory.restart()


class HostCommunicator(SharedMemoryCommunicator):
    """Of any device: what is gathered goes to the host, through the memory that CPUs share, and back.

    The host waits for the device each time, so steps are not recorded.
    """

    medium = "the host's memory, which is slower than between devices"
    is_recorded = False

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, platform: Platform) -> None:
        super().__init__(rank, size, rendezvous, platform)
        self._backend: Backend = backend_for(platform)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._uploaded(super().all_gather(self._downloaded(x)), x.dtype)

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        (ids,) = self._backend.download(owners)
        return self._uploaded(super().pick(self._downloaded(x), torch.from_numpy(ids)), x.dtype)

    def _downloaded(self, x: torch.Tensor) -> torch.Tensor:
        """As float32, which holds the values of 16 bits."""
        (values,) = self._backend.download(x.float())
        return torch.from_numpy(values)

    def _uploaded(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._backend.upload(values.numpy()).to(dtype)


class Work(Protocol):
    """What a group was asked for."""

    def wait(self) -> object: ...


class ProcessGroup(Protocol):
    """A backend of torch.distributed."""

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, /) -> Work: ...
    def abort(self) -> None: ...


class Mark(Protocol):
    """A place in what a device was asked: `query` tells whether it was reached."""

    def query(self) -> bool: ...


class ProcessGroupCommunicator(Communicator):
    """Over a process group of torch.distributed of this object's own: the one of `init_process_group` is the user's.

    Ranks meet before the first step, and again after one that was given up: the group of that one is gone. What says
    that a step is given up is in a file that all ranks map, and a thread of each looks at it: one that waits for its
    device cannot. Steps that were recorded with the group are to be forgotten when it is given up.
    """

    needs_own_device = True
    meets_again = True

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, platform: Platform) -> None:
        super().__init__(rank, size, rendezvous, platform)
        self._folder, self._timeout_s = rendezvous.folder, rendezvous.timeout_s
        self._state = _SharedState(self._folder / "given up", makes=rank == 0)
        self._lock = threading.Lock()  # of what follows: one thread makes it, another ends it
        self._group: ProcessGroup | None = None
        self._attempt = -1  # that the group is of
        self._deadlines: deque[tuple[Mark, float]] = deque()
        self._retired: deque[ProcessGroup] = deque()
        self._endings: list[threading.Thread] = []
        self._late = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ranks", daemon=True)
        self._thread.start()

    def make_group(self, store: Store) -> ProcessGroup:
        """A `torch.distributed` backend of all ranks."""
        raise NotImplementedError

    def mark(self) -> Mark | None:
        """That the device has done what it was asked until now; None: the host waits for that anyway."""
        return None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        parts = torch.empty(self.size, *rows.shape, dtype=x.dtype, device=x.device)
        self._gather(parts, rows)
        return parts.transpose(0, 1).reshape(*x.shape[:-1], self.size * x.shape[-1])

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._gather(parts, x.contiguous())
        return parts[owners, torch.arange(len(x), device=x.device)]

    def abort(self) -> None:
        self._state.give_up()

    def restart(self) -> None:
        self._retire()
        self._late = 0
        self._state.begin()

    def close(self) -> None:
        self._state.give_up()
        self._closed.set()
        self._thread.join()
        for ending in self._endings:
            ending.join(_END_SECONDS)

    def watch(self) -> None:
        mark = self.mark()
        if mark is not None:
            with self._lock:
                self._deadlines.append((mark, monotonic() + self._timeout_s))

    def check(self) -> None:
        if not self._state.is_given_up:
            return
        if self._late:
            raise RankError(f"rank {self._late} did not come to a step within {self._timeout_s:g} seconds.", self._late)
        raise RankError("another rank left the step.")

    def _gather(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        """parts [ranks, ...], of each rank its own, in order of rank."""
        self.check()
        if not own.numel():
            return
        try:
            self._met()._allgather_base(parts.view(-1), own.view(-1)).wait()
        except RankError:
            raise
        except RuntimeError as error:  # torch.distributed's, when the group was ended or another rank is gone
            self._state.give_up()
            raise RankError(f"ranks could not gather: {str(error).splitlines()[0]}") from error
        self.check()

    def _met(self) -> ProcessGroup:
        """The group of this attempt."""
        attempt, group = self._state.attempt, self._group
        if group is not None and self._attempt == attempt:
            return group
        from torch.distributed import FileStore, PrefixStore

        self._retire()
        store = PrefixStore(f"attempt {attempt}", FileStore(str(self._folder / "store")))
        store.set_timeout(timedelta(seconds=self._timeout_s))
        self._await_all(store)
        group = self.make_group(store)
        with self._lock:
            self._group, self._attempt = group, attempt
        return group

    def _await_all(self, store: Store) -> None:
        store.set(f"rank {self.rank} is here", "")
        until = monotonic() + self._timeout_s
        for rank in range(self.size):
            while not store.check([f"rank {rank} is here"]):
                self.check()
                if monotonic() > until:
                    self._late = rank
                    self._state.give_up()
                    self.check()
                sleep(0.001)

    def _retire(self) -> None:
        """Leave the group of an attempt that was given up to the thread that ends it; a later one's is let alone."""
        with self._lock:
            if self._attempt >= self._state.given_up:
                return
            if self._group is not None:
                self._retired.append(self._group)
            self._group = None
            self._deadlines.clear()

    def _look(self) -> None:
        """End the group where the step was given up, and give it up where the device is not done in time.

        Whoever waits for the device goes on as soon as the end begins. That takes until no recorded step refers to the
        group, so each has a thread of its own, and this one goes on looking.
        """
        while not self._closed.wait(_POLL_SECONDS):
            if self._is_overdue():
                self._late = 1 if self.size == 2 else 0  # of several, NCCL does not say which; asking them does
                self._state.give_up()
            self._end_retired()
        self._end_retired()

    def _end_retired(self) -> None:
        if self._state.is_given_up:
            self._retire()
        self._endings = [ending for ending in self._endings if ending.is_alive()]
        while self._retired:
            ending = threading.Thread(target=self._retired.popleft().abort, name="end of ranks", daemon=True)
            ending.start()
            self._endings.append(ending)

    def _is_overdue(self) -> bool:
        with self._lock:
            while self._deadlines and self._deadlines[0][0].query():
                self._deadlines.popleft()
            return bool(self._deadlines) and monotonic() > self._deadlines[0][1]


class NcclCommunicator(ProcessGroupCommunicator):
    """Of NVIDIA's and AMD's GPUs, one for each rank. Gathering is queued on the device, so steps can be recorded.

    NCCL finds the ranks over a socket, which is bound to the loopback interface unless NCCL_SOCKET_IFNAME says another.
    """

    medium = "NCCL"

    # NCCL's for a group of one machine; and PyTorch's watchdog leaves the process alone, whose program is the user's.
    _ENVIRONMENT: ClassVar[dict[str, str]] = {
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, platform: Platform) -> None:
        super().__init__(rank, size, rendezvous, platform)
        self._device = platform.device

    def make_group(self, store: Store) -> ProcessGroup:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # waits are watched here
        with _defaults(self._ENVIRONMENT):
            group = ProcessGroupNCCL(store, self.rank, self.size, options)
            group.eager_connect_single_device(self._device)
        return cast(ProcessGroup, group)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event


class _SharedState:
    """Which attempt the ranks are in, and how many were given up, in memory that all of them map.

    Args:
        makes: this rank makes the file; the others come later.
    """

    def __init__(self, file: Path, makes: bool) -> None:
        with file.open("x+b" if makes else "r+b") as opened:
            if makes:
                opened.write(bytes(16))
                opened.flush()
            self._words = np.frombuffer(mmap.mmap(opened.fileno(), 16), dtype=np.int64)

    @property
    def attempt(self) -> int:
        return int(self._words[0])

    @property
    def given_up(self) -> int:
        return int(self._words[1])

    @property
    def is_given_up(self) -> bool:
        return self.given_up > self.attempt

    def give_up(self) -> None:
        self._words[1] = self._words[0] + 1

    def begin(self) -> None:
        self._words[0] = self._words[1]


@contextmanager
def _defaults(variables: dict[str, str]) -> Iterator[None]:
    """Variables of the environment, for libraries that read them meanwhile, but for those that the user has set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
