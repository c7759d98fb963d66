"""A worker process: started from this one with a socket pair, watched, and gone when this one is.

It never imports `__main__`, so that scripts and notebooks need no guard, and nothing listens on a network address. It
is found dead by the end of its socket, hung by its silence while it should compute (`LLM_WORKER_TIMEOUT`). What it
writes to its output goes to this process's stderr, with its name before each line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import IO

from llm.base.locks import tell_of_forks
from llm.config import env
from llm.errors import LLMError, WorkerDiedError
from llm.workers.connection import Connection
from llm.workers.messages import Message, Schema

FAILED = "failed"  # the message of a worker whose role raised: its traceback
_END_SECONDS = 10.0  # that a worker has for its own clean-up
_POLL_SECONDS = 1.0
_LINES = 20  # of its output, kept for the error when it dies


class WorkerProcess:
    """A running worker.

    Args:
        role: the module whose `serve(connection, number)` the worker runs; its messages are of the module's `SCHEMA`.
        number: of the worker among those of its program.
        schema: the role's.
        cores: the processors that it may run on; None: those of this process.
        environment: variables that it gets besides this process's.
        name: of the worker in what is written and raised.

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
    ) -> None:
        self.number = number
        self.name = f"{name} {number}"
        self.seconds = env.get_seconds("LLM_WORKER_TIMEOUT", 300.0)
        here, there = socket.socketpair()
        with there:
            command = [
                sys.executable,
                # As a file: `-m` would search the working folder first, whatever modules are in it.
                str(Path(__file__).with_name("start.py")),
                json.dumps(
                    {
                        "socket": there.fileno(),
                        "role": role,
                        "number": number,
                        "cores": None if cores is None else sorted(cores),
                        "path": [entry or os.getcwd() for entry in sys.path],
                    }
                ),
            ]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[there.fileno()],
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,  # Ctrl-C in the terminal is for this process, which tells its workers
                )
            except OSError as error:
                here.close()
                raise LLMError(f"{self.name} cannot be started: {error}.") from error
        self.connection = Connection(here, schema)
        self._lines: deque[str] = deque(maxlen=_LINES)
        output = self._process.stdout
        if output is None:
            raise RuntimeError("a worker was started without a pipe")
        self._forwarder = threading.Thread(
            target=_forward, args=(output, self.name, self._lines), name=f"output of {self.name}", daemon=True
        )
        self._forwarder.start()
        # At exit, and when nothing refers to this object. Not in a forked child, whose worker it is not.
        self._end = weakref.finalize(self, _end, self._process, here, os.getpid())
        self._died: WorkerDiedError | None = None
        tell_of_forks(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._died is None and self._end.alive

    def fileno(self) -> int:
        """Of its socket, for `select`: readable when there is a message, or the worker is dead."""
        return self.connection.fileno()

    def send(self, kind: str, body: object = None) -> None:
        """Raises `WorkerDiedError`."""
        self._check()
        try:
            self.connection.send(kind, body)
        except EOFError:
            raise self._death() from None

    def receive(self, seconds: float | None = None, *, watched: bool = True) -> Message | None:
        """The next message, None if none came in so many seconds.

        Args:
            watched: the worker has something to do: if it is silent for longer than `LLM_WORKER_TIMEOUT`, it is ended.

        Raises:
            WorkerDiedError: it is dead, or was ended because of its silence; with its traceback if it has told one.
        """
        self._check()
        began = monotonic()
        end = None if seconds is None else began + seconds
        while True:
            left = _POLL_SECONDS if end is None else min(_POLL_SECONDS, max(0.0, end - monotonic()))
            try:
                message = self.connection.receive(left)
            except EOFError:
                raise self._death() from None
            if message is not None and message.kind == FAILED:
                raise self._death(str(message.body))
            if message is not None:
                return message
            if watched:
                self.check_heard(began)
            if end is not None and monotonic() >= end:
                return None

    def check_heard(self, since: float) -> None:
        """End the worker if it was silent for too long, counted from `since` (`time.monotonic`) at the earliest.

        Raises:
            WorkerDiedError: it was.
        """
        silent = monotonic() - max(since, self.connection.heard)
        if silent > self.seconds:
            raise self._death(hung=f"it has said nothing for {silent:.0f} seconds (LLM_WORKER_TIMEOUT), and was ended")

    def close(self) -> None:
        """End the worker and wait until it is gone. May be called again."""
        self._end()
        if self._forwarder is not threading.current_thread():
            self._forwarder.join(_END_SECONDS)

    def kill(self) -> None:
        """End the worker at once."""
        if self._end.alive:
            self._process.kill()
        self.close()

    def after_fork(self) -> None:
        """In a forked child: let go of the socket, or the worker would not see the end of the parent."""
        self.connection.close()
        self._died = WorkerDiedError(f"{self.name} is of the process that this one was forked from.", self.number)

    def _last_words(self) -> str:
        """The traceback that the worker sent before it ended; "": none."""
        try:
            while (message := self.connection.receive(0)) is not None:
                if message.kind == FAILED:
                    return str(message.body)
        except EOFError:
            pass
        return ""

    def _check(self) -> None:
        if self._died is not None:
            raise self._died
        if not self._end.alive:
            raise WorkerDiedError(f"{self.name} was closed.", self.number)

    def _death(self, trace: str = "", hung: str = "") -> WorkerDiedError:
        """The error that says how the worker ended, which it has by now."""
        if hung:
            self._process.kill()
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        trace = trace or self._last_words()
        self.close()
        if trace:
            said = f"{self.name} failed:\n{trace.rstrip()}"
        else:
            last = "".join(f"\n  {line}" for line in self._lines)
            said = f"{self.name} died: {hung or _told(status)}" + (f"; its last lines:{last}" if last else ".")
        self._died = WorkerDiedError(said, self.number)
        return self._died


def _told(status: int) -> str:
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"it was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _forward(output: IO[bytes], name: str, lines: deque[str]) -> None:
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            if sys.stderr is not None:
                print(f"{name}: {text}", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[bytes], end: socket.socket, owner: int) -> None:
    """The worker ends when its socket does; one that cannot is killed."""
    end.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
