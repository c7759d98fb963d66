"""Renders chat templates in another process, which is limited in memory and time and can be killed.

Owns that process: one for each process, started when the first template needs it, ended with this one. It is asked by
one thread at a time. A forked child starts its own.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import jinja2
import markupsafe
from jinja2 import exceptions

from llm.base.forks import renewed_in_children, tell_of_forks
from llm.base.types import JsonObject

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 5.0
MOST_CHARACTERS = 1 << 25
_WALL_SECONDS = 120.0  # on a machine that is so busy that a process gets no time
_MOST_BYTES = 8 * MOST_CHARACTERS
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # of the environment: what an interpreter and dates need
_LIMITS = {"memory": f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"}


class TemplateLimit(Exception):
    """A template takes too long or needs too much; the message says what."""


class _Ended(Exception):
    """The process ended before it answered."""


class TemplateProcess:
    def __init__(self) -> None:
        self._lock = renewed_in_children(threading.Lock())
        self._process: subprocess.Popen[bytes] | None = None
        tell_of_forks(self)

    def render(self, template: str, data: JsonObject) -> str:
        """The text of a template.

        Raises:
            TemplateLimit: it goes over a limit, or the process cannot be started.
            TypeError: the data are no JSON.
            Exception: what the template raised.
        """
        return str(self._answer({"template": template, "data": data, "most": MOST_CHARACTERS})["text"])

    def names_read(self, template: str) -> frozenset[str]:
        """The names that a template takes from its arguments. Raises as `render`."""
        return frozenset(self._answer({"template": template})["names"])

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        with self._lock:
            self._kill()

    def after_fork(self) -> None:
        """In a forked child: the process is its parent's, and so are the pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # it is not this process's to wait for
            for pipe in _pipes(process):
                pipe.close()

    def _answer(self, request: JsonObject) -> JsonObject:
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._kill()  # somebody else ended it
                if self._process is None:
                    self._process = _start()
                answer = self._exchange(self._process, data)
            except _Ended:
                raise TemplateLimit(_why_ended(self._kill())) from None
            except BaseException:  # Ctrl-C too: what is still to be read would be taken for the next answer
                self._kill()
                raise
            if answer.get("limit") == "memory":
                self._kill()
        if "limit" in answer:
            raise TemplateLimit(_LIMITS.get(answer["limit"], answer["limit"]))
        if "error" in answer:
            raise _error(str(answer["error"]), str(answer["message"]))
        return answer

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes) -> JsonObject:
        given, told = (pipe.fileno() for pipe in _pipes(process))
        deadline = time.monotonic() + _WALL_SECONDS
        waiting = memoryview(len(data).to_bytes(8, "big") + data)
        while waiting:
            _wait(given, select.POLLOUT, deadline)
            try:
                waiting = waiting[os.write(given, waiting) :]
            except BrokenPipeError:
                raise _Ended from None
        size = int.from_bytes(_read(told, 8, deadline), "big")
        if size > _MOST_BYTES:
            raise TemplateLimit(f"it makes more than {MOST_CHARACTERS} characters")
        answer = json.loads(_read(told, size, deadline))
        return answer if isinstance(answer, dict) else {}

    def _kill(self) -> int | None:
        """End the process, if there is one; its exit status as `subprocess` has it."""
        process, self._process = self._process, None
        if process is None:
            return None
        status = process.poll()
        if status is None:
            try:  # it may be ending itself, and its own reason is the one to tell
                status = process.wait(5 if _is_at_end(_pipes(process)[1].fileno()) else 0)
            except subprocess.TimeoutExpired:
                process.kill()
        for pipe in _pipes(process):
            pipe.close()
        process.wait()
        return status


def _start() -> subprocess.Popen[bytes]:
    if os.name != "posix" or not sys.executable:
        raise TemplateLimit("it is more than plain, and this system cannot limit a process that renders it")
    paths = {str(Path(str(module.__file__)).parent.parent) for module in (jinja2, markupsafe)}
    limits = [str(MEMORY_BYTES), str(CPU_SECONDS)]
    try:
        process = subprocess.Popen(
            # Isolated: no code of the user's folders, of the environment's or of site-packages' .pth files is run.
            [
                sys.executable,
                "-I",
                "-S",
                "-B",
                str(Path(__file__).with_name("template_child.py")),
                *limits,
                *sorted(paths),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            close_fds=True,
        )
    except OSError as error:
        raise TemplateLimit(f"it is more than plain, and no process to render it can be started ({error})") from error
    os.set_blocking(_pipes(process)[0].fileno(), False)
    return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Its standard input and output."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    return process.stdin, process.stdout


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TemplateLimit(f"it takes more than {_WALL_SECONDS:g} seconds")


def _read(descriptor: int, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        _wait(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise _Ended
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _is_at_end(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _why_ended(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} seconds"
    return "it ended the process that renders it, by more memory or nesting than that has"


def _error(name: str, message: str) -> Exception:
    """What the template raised: an exception of jinja's or a builtin one."""
    kind = getattr(exceptions, name, getattr(builtins, name, None))
    if name == "TemplateSyntaxError":
        return exceptions.TemplateSyntaxError(message, 1)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(message)
    return exceptions.TemplateRuntimeError(f"{name}: {message}")


PROCESS = TemplateProcess()
atexit.register(PROCESS.close)
