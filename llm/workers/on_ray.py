"""Workers on the machines of a Ray cluster: an actor starts what is started here otherwise, and carries its bytes.

The actor is in the first bundle of a placement group of its own, all on one machine (STRICT_PACK): the worker may start
processes for the other bundles, which hold their processors or devices for them. The network is Ray's.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from queue import Empty, SimpleQueue
from time import monotonic
from types import ModuleType
from typing import IO, NamedTuple, Protocol

from llm.base.optional import optional_package
from llm.config import env
from llm.errors import ValidationError
from llm.workers.process import exit_of, start_interpreter

Bundle = Mapping[str, float]
_POLL_SECONDS = 0.5
_KILL_SECONDS = 5.0
_CHUNK = 1 << 20
# Methods of an actor that may wait at once: `receive` always does.
_AT_ONCE = 4


class Piece(NamedTuple):
    """What has come of a worker: bytes of its socket or of its output, or in the end its status."""

    socket: bytes = b""
    output: bytes = b""
    status: int | None = None


class _Method(Protocol):
    def remote(self, *args: object) -> object: ...


class _Handle(Protocol):
    """Ray's, of a `WorkerHost`."""

    pid: _Method
    send: _Method
    receive: _Method
    shut_down: _Method
    kill: _Method


class _Group(Protocol):
    """Ray's, of bundles."""

    def wait(self, timeout_seconds: float) -> bool: ...


def connected_ray() -> ModuleType:
    """Ray, connected to its cluster; raises `MissingPackageError`."""
    ray = optional_package("ray", "ray")
    if not ray.is_initialized():
        ray.init()
    return ray


class RayMachines:
    """The machines that are alive."""

    def __init__(self, ray: ModuleType) -> None:
        self._all: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    @cached_property
    def cpus(self) -> int:
        """Processors of the smallest that has one."""
        return min([int(cpus) for cpus in self._each("CPU") if cpus >= 1] or [1])

    def most_of(self, workers: int) -> int:
        """The most of so many workers that are on one machine, if they are spread."""
        return -(-workers // (sum(cpus >= 1 for cpus in self._each("CPU")) or 1))

    @property
    def memory(self) -> int:
        """Bytes that Ray has for actors on the smallest machine that has a processor."""
        return min([int(one["memory"]) for one in self._all if one.get("CPU", 0) >= 1 and "memory" in one] or [0])

    def check_room(self, bundles: Sequence[Bundle], parameter: str) -> None:
        """Raise `ValidationError` if no machine has all of the bundles, however few others use."""
        needed = {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}
        if not any(all(one.get(name, 0) >= count for name, count in needed.items()) for one in self._all):
            asked = " and ".join(f"{count:g} {name}" for name, count in needed.items())
            largest = ", ".join(f"{max(self._each(name), default=0):g} {name}" for name in needed)
            raise ValidationError(
                f"the {len(bundles)} bundles of a replica need {asked} on one machine of the Ray cluster, whose "
                f"machines have at most {largest}; lower tensor_parallel_size or num_threads.",
                parameter=parameter,
            )

    def _each(self, name: str) -> list[float]:
        return [one.get(name, 0) for one in self._all]


class WorkerHost:
    """The actor: a worker beside it, on its machine. Its methods are called from several threads."""

    def __init__(self, role: str, number: int, environment: Mapping[str, str]) -> None:
        self._end, there = socket.socketpair()
        with there:
            self._process = start_interpreter(there, role, number, {**os.environ, **environment})
        self._said: SimpleQueue[Piece] = SimpleQueue()
        threading.Thread(target=self._gather, daemon=True).start()

    def pid(self) -> int:
        """Of the worker."""
        return self._process.pid

    def send(self, data: bytes) -> None:
        """To the worker's socket."""
        with contextlib.suppress(OSError):  # its end is said by `receive`
            self._end.sendall(data)

    def receive(self) -> list[Piece]:
        """What has come of the worker since the last call; waits for one."""
        found = [self._said.get()]
        with contextlib.suppress(Empty):
            while True:
                found.append(self._said.get_nowait())
        return found

    def shut_down(self) -> None:
        """Nobody wants the worker: it ends itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        self._process.kill()

    def _gather(self) -> None:
        readers = [threading.Thread(target=read, daemon=True) for read in (self._read_socket, self._read_output)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self._said.put(Piece(status=self._process.wait()))

    def _read_socket(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._end.recv(_CHUNK):
                self._said.put(Piece(socket=data))

    def _read_output(self) -> None:
        output = self._process.stdout
        while output is not None and (data := os.read(output.fileno(), _CHUNK)):
            self._said.put(Piece(output=data))


class RayProcess:
    """A worker of a `WorkerHost`, as the `StartedProcess` of a `WorkerProcess`; a thread of this program serves it.

    When it has ended, its actor and its placement group are gone.

    Args:
        role, number: of the worker.
        bundles: of its placement group.
        environment: variables that the worker has besides those of Ray's actors.
        end: of the socket pair of the `WorkerProcess`.
    """

    def __init__(
        self, role: str, number: int, bundles: Sequence[Bundle], environment: Mapping[str, str], end: socket.socket
    ) -> None:
        self.pid = 0  # until it has one
        self.stdin: IO[bytes] | None = io.BytesIO()
        reads, writes = os.pipe()
        self.stdout: IO[bytes] | None = os.fdopen(reads, "rb")
        self._output = os.fdopen(writes, "wb", buffering=0)
        self._end = end.dup()
        self._bundles = [dict(bundle) for bundle in bundles]
        self._arguments = role, number, dict(environment)
        self._ray = connected_ray()
        self._host: _Handle | None = None
        self._was_killed = False
        self._status = 1
        self._why = ""  # it was lost, where it has no status
        self._over = threading.Event()
        for target in (self._serve, self._carry_out):
            threading.Thread(target=target, daemon=True).start()

    @property
    def _is_wanted(self) -> bool:
        return not (self.stdin is None or self.stdin.closed or self._was_killed or self._over.is_set())

    def poll(self) -> int | None:
        return self._status if self._over.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("ray", timeout or 0.0)
        return self._status

    def ending(self) -> str:
        return self._why or exit_of(self._status)

    def kill(self) -> None:
        self._was_killed = True
        if self._host is not None and not self._over.is_set():
            with contextlib.suppress(self._ray.exceptions.RayError):  # it is dead
                # A stopped process outlives its actor.
                self._ray.get(self._host.kill.remote(), timeout=_KILL_SECONDS)
            self._ray.kill(self._host)

    def _serve(self) -> None:
        try:
            group = self._ray.util.placement_group(self._bundles, strategy="STRICT_PACK")
            try:
                self._carry_in(group)
            finally:
                self._let_go(group)
        except Exception as error:  # Ray's, of many classes: all of them are how this worker ended
            self._why = _sentence(error)
        finally:
            self._output.close()
            with contextlib.suppress(OSError):  # the other end is closed
                self._end.shutdown(socket.SHUT_RDWR)
            self._over.set()

    def _carry_in(self, group: _Group) -> None:
        if not self._has_room(group):
            return
        strategies = optional_package("ray.util.scheduling_strategies", "ray")
        first = self._bundles[0]
        host: _Handle = (
            self._ray.remote(WorkerHost)
            .options(
                num_cpus=first.get("CPU", 0),
                num_gpus=first.get("GPU", 0),
                max_concurrency=_AT_ONCE,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(*self._arguments)
        )
        self._host = host
        self.pid = self._ray.get(host.pid.remote())
        while self._ray.is_initialized():
            for piece in self._ray.get(host.receive.remote()):
                if piece.status is not None:
                    self._status = piece.status
                    return
                with contextlib.suppress(OSError):  # nobody reads any more
                    self._output.write(piece.output)
                    self._end.sendall(piece.socket)

    def _has_room(self, group: _Group) -> bool:
        """Wait for the bundles; False: the worker is not wanted any more, or they cannot be had."""
        seconds = env.get_seconds("LLM_WORKER_TIMEOUT", 300.0) / 2  # the other half is the worker's
        end = monotonic() + seconds
        while self._is_wanted and monotonic() < end:
            if group.wait(_POLL_SECONDS):
                return True
        if not self._is_wanted:
            return False
        asked = ", ".join(f"{count:g} {name}" for name, count in self._bundles[0].items())
        self._why = (
            f"the Ray cluster has had no machine with {len(self._bundles)} times {asked} free for {seconds:.0f} "
            "seconds (half of LLM_WORKER_TIMEOUT)"
        )
        return False

    def _carry_out(self) -> None:
        """To the worker, until this program has closed its end."""
        with contextlib.suppress(OSError, self._ray.exceptions.RayError):  # `_serve` meets the same
            while data := self._end.recv(_CHUNK):
                while self._host is None and self._is_wanted:
                    self._over.wait(_POLL_SECONDS / 10)
                if self._host is not None:
                    self._ray.get(self._host.send.remote(data))
        if self._host is not None and not self._over.is_set() and self._ray.is_initialized():
            self._host.shut_down.remote()
        self._end.close()

    def _let_go(self, group: _Group) -> None:
        if self._ray.is_initialized():  # or else all of it is gone; asking would start Ray again
            if self._host is not None:
                self._ray.kill(self._host)
            self._ray.util.remove_placement_group(group)


def _sentence(error: Exception) -> str:
    """Of Ray's errors, which begin with what happened and may end with a remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines[0] if lines else type(error).__name__).rstrip(".:")
    return f"Ray says: {first}" if len(lines) < 2 or "creation task" not in first else f"Ray says: {lines[-1]}"
