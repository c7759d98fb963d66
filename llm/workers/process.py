"""A worker process: started from this one with a socket pair, watched, and gone when this one is.

It never imports `__main__`, so that scripts and notebooks need no guard, and nothing listens on a network address. It
is found dead by the end of its socket, hung by its silence while it should compute (`LLM_WORKER_TIMEOUT`). What it
writes to its output goes to this process's stderr, with its name before each line.

The worker's standard input is open as long as this process wants it. Its socket is read and written by threads of this
process: no signal handler, which may raise anywhere in the main thread, leaves half a message behind, and both ends may
send at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import IO, NamedTuple, Protocol

from llm.base import system
from llm.base.locks import tell_of_forks
from llm.config import env
from llm.errors import LLMError, WorkerDiedError
from llm.workers.connection import Connection
from llm.workers.messages import Message, Schema

FAILED = "failed"  # the message of a worker whose role raised: its traceback
_END_SECONDS = 10.0  # that a worker has for its own clean-up
_POLL_SECONDS = 1.0
_LINES = 20  # of its output, kept for the error when it dies

# Messages of workers, each with its worker's number; None: the worker is gone.
Inbox = SimpleQueue[tuple[int, Message | None]]


class StartedProcess(Protocol):
    """What a `WorkerProcess` asks of a `subprocess.Popen`, and how it ended."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...

    def ending(self) -> str:
        """How it ended, which it has."""
        ...


class Interpreter(subprocess.Popen[bytes]):
    """A worker on this machine."""

    def ending(self) -> str:
        return exit_of(self.returncode)


def exit_of(status: int) -> str:
    """How a process with this status ended."""
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"it was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def start_interpreter(
    end: socket.socket,
    role: str,
    number: int,
    environment: Mapping[str, str],
    *,
    cores: Iterable[int] | None = None,
    folder: str = "",
    files: Sequence[int] = (),
) -> Interpreter:
    """Start a worker on this machine, which takes over its end of a socket pair; raises OSError."""
    arguments = {
        "role": role,
        "number": number,
        "cores": None if cores is None else sorted(cores),
        "path": system.search_path(),
        "folder": folder,
    }
    process = Interpreter(
        # As a file: `-m` would search the working folder first, whatever modules are in it.
        [sys.executable, str(Path(__file__).with_name("start.py")), json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        pass_fds=[*system.inherited_fds(end), *files],
        # Ctrl-C in the terminal is for this process, which tells its workers.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows' own
    )
    if process.stdin is None:
        raise RuntimeError("a worker was started without pipes")
    with contextlib.suppress(BrokenPipeError):  # it has died, which the end of its socket tells
        os.write(process.stdin.fileno(), system.export_socket(end, process.pid).hex().encode() + b"\n")
    return process


class WorkerProcess:
    """A running worker.

    Args:
        role: the module whose `serve(connection, number)` the worker runs; its messages are of the module's `SCHEMA`.
        number: of the worker among those of its program.
        schema: the role's.
        cores: the processors that it may run on; None: those of this process.
        environment: variables that it gets besides this process's.
        name: of the worker in what is written and raised.
        inbox: gets its messages, for who waits for several workers; None: `receive` gives them.
        folder: of this program, which the worker deletes if the program is gone; "": none.
        files: descriptors that it has too, under the same numbers.
        start: starts it elsewhere, with its end of the socket pair; None: it is an interpreter on this machine, with
            `cores`, `environment`, `folder` and `files`.

    Raises:
        LLMError: the system starts no process.
    """

    def __init__(
        self,
        role: str,
        number: int,
        schema: Schema,
        *,
        cores: Iterable[int] | None = None,
        environment: Mapping[str, str] | None = None,
        name: str = "worker",
        inbox: Inbox | None = None,
        folder: str = "",
        files: Sequence[int] = (),
        start: Callable[[socket.socket], StartedProcess] | None = None,
    ) -> None:
        self.number = number
        self.name = f"{name} {number}"
        self.seconds = env.get_seconds("LLM_WORKER_TIMEOUT", 300.0)
        here, there = socket.socketpair()
        try:
            with there:
                if start is None:
                    settings = {**os.environ, **(environment or {})}
                    self._process: StartedProcess = start_interpreter(
                        there, role, number, settings, cores=cores, folder=folder, files=files
                    )
                else:
                    self._process = start(there)
        except OSError as error:
            here.close()
            raise LLMError(f"{self.name} cannot be started: {error}.") from error
        given, output = self._process.stdin, self._process.stdout
        if given is None or output is None:
            raise RuntimeError("a worker was started without pipes")
        self._schema = schema
        self._wanted = _Wanted(given, here)
        self._connection = connection = Connection(here, schema)
        self._inbox: Inbox = SimpleQueue() if inbox is None else inbox
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._at_end: list[Callable[[], object]] = []
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._died: WorkerDiedError | None = None
        self._threads = [
            threading.Thread(target=_forward, args=(output, self.name, self._lines), daemon=True),
            threading.Thread(target=_receive_all, args=(connection, number, self._inbox, self._at_end), daemon=True),
            threading.Thread(target=_send_all, args=(connection, self._outgoing), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        # At exit, and when nothing refers to this object. Not in a forked child, whose worker it is not.
        self._end = weakref.finalize(self, _end, self._process, self._wanted, self._outgoing, os.getpid())
        tell_of_forks(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._died is None and self._end.alive

    def send(self, kind: str, body: object = None) -> None:
        """Queue a message, and copy what is in it.

        Raises:
            ValidationError: the body has what the schema has not. WorkerDiedError.
        """
        self._check()
        self._outgoing.put(self._schema.encode(kind, body))

    def call_at_end(self, call: Callable[[], object]) -> None:
        """Have this called, in a thread, when the worker is gone, however it ended; in the place of an earlier one."""
        self._at_end[:] = [call]

    def receive(self, seconds: float | None = None, *, watched: bool = True) -> Message | None:
        """The next message, None if none came in so many seconds.

        Args:
            watched: the worker has something to do: if it is silent for longer than `LLM_WORKER_TIMEOUT`, it is ended.

        Raises:
            WorkerDiedError: it is dead, or was ended because of its silence; with its traceback if it sent one.
        """
        self._check()
        began = monotonic()
        end = None if seconds is None else began + seconds
        while True:
            left = _POLL_SECONDS if end is None else min(_POLL_SECONDS, max(0.0, end - monotonic()))
            try:
                return self.check_message(self._inbox.get(timeout=left)[1])
            except Empty:
                if watched:
                    self.check_heard(began)
                if end is not None and monotonic() >= end:
                    return None

    def check_message(self, message: Message | None) -> Message:
        """A message that came from this worker by an inbox; raises `WorkerDiedError` where it is its end."""
        if message is None or message.kind == FAILED:
            raise self._death("" if message is None else str(message.body))
        return message

    def check_heard(self, since: float) -> None:
        """End the worker if it was silent for too long, counted from `since` (`time.monotonic`) at the earliest.

        Raises:
            WorkerDiedError: it was.
        """
        self._check()  # in a forked child there is nothing to wait for
        silent = monotonic() - max(since, self._connection.heard)
        if silent > _END_SECONDS and self._process.poll() is not None:
            raise self._death()  # whose message was lost with the call that took it
        if silent > self.seconds:
            raise self._death(hung=f"it has said nothing for {silent:.0f} seconds (LLM_WORKER_TIMEOUT), and was ended")

    def close(self) -> None:
        """End the worker and wait until it is gone. May be called again."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_SECONDS)
        self._connection.close()

    def shut_down(self) -> None:
        """Let the worker end, without waiting for it: `close` does."""
        if self._end.alive:
            self._wanted.end()

    def kill(self) -> None:
        """End the worker at once."""
        if self._end.alive:
            self._process.kill()
        self.close()

    def after_fork(self) -> None:
        """In a forked child: let go of what the worker sees the end of its program by."""
        self._wanted.standard_input.close()
        self._connection.close()
        self._died = WorkerDiedError(f"{self.name} is of the process that this one was forked from.", self.number)

    def _check(self) -> None:
        if self._died is not None:
            raise self._died
        if not self._end.alive:
            raise WorkerDiedError(f"{self.name} was closed.", self.number)

    def _death(self, trace: str = "", hung: str = "") -> WorkerDiedError:
        """The error that says how the worker ended, which it has by now."""
        if self._died is not None:
            return self._died
        if hung:
            self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.close()
        if trace:
            is_sentence = len(trace.splitlines()) == 1
            said = f"{self.name} failed:" + (" " if is_sentence else "\n") + trace.rstrip()
        else:
            last = "".join(f"\n  {line}" for line in self._lines)
            said = f"{self.name} died: {hung or self._process.ending()}" + (f"; its last lines:{last}" if last else ".")
        self._died = WorkerDiedError(said, self.number)
        return self._died


def _forward(output: IO[bytes], name: str, lines: deque[str]) -> None:
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            try:
                print(f"{name}: {text}", file=sys.stderr, flush=True)
            except (OSError, ValueError):  # this program has closed its own; the worker must not wait for a reader
                continue


def _receive_all(connection: Connection, number: int, inbox: Inbox, at_end: list[Callable[[], object]]) -> None:
    try:
        while (message := connection.receive()) is not None:
            inbox.put((number, message))
    except EOFError:
        inbox.put((number, None))
        for call in at_end:
            call()


def _send_all(connection: Connection, outgoing: SimpleQueue[bytes | None]) -> None:
    try:
        while (data := outgoing.get()) is not None:
            connection.send_bytes(data)
    except EOFError:
        return  # the thread that receives tells it, after what the worker has sent


class _Wanted(NamedTuple):
    """What is open while the worker is wanted: its standard input, and its socket."""

    standard_input: IO[bytes]
    socket: socket.socket

    def end(self) -> None:
        """The worker and the threads of this process see it."""
        self.standard_input.close()
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)


def _end(process: StartedProcess, wanted: _Wanted, outgoing: SimpleQueue[bytes | None], owner: int) -> None:
    """The worker ends when it is no longer wanted; one that cannot is killed."""
    outgoing.put(None)
    if os.getpid() != owner:
        return
    wanted.end()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
