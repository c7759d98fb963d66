"""A model runner in another process, behind a pipe: what a worker of another machine would be.

Every method of the boundary is a message (name, arguments) and its answer, pickled.
One process serves any number of runners, one after the other or side by side.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from llm.engine.boundary import Runner
from llm.errors import LLMError
from llm.platforms import Platform, select_platform
from llm.plugins import load_general_plugins
from llm.setup import build

METHODS = frozenset(name for name in vars(Runner) if not name.startswith("_"))


class RemoteRunner:
    """Stands in for the runner that `Server` holds under a number; `messages` counts what was asked."""

    def __init__(self, pipe: Connection, platform: Platform) -> None:
        self._pipe = pipe
        self.messages = 0
        self._number = self._ask("make", platform.name)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"{name} is not of the boundary")
        return lambda *args: self._ask(name, *args)

    def _ask(self, method: str, *args: Any) -> Any:
        self.messages += 1
        self._pipe.send_bytes(pickle.dumps((self.__dict__.get("_number"), method, args)))
        is_error, answer = pickle.loads(self._pipe.recv_bytes())
        if is_error:
            raise answer
        return answer


def serve(pipe: Connection) -> None:
    """The other process: answers until the pipe is closed."""
    torch.set_num_threads(1)
    load_general_plugins()
    runners: dict[int, Any] = {}
    while True:
        try:
            number, method, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if method == "make":
                answer: Any = len(runners)
                runners[answer] = build.make_runner(select_platform(*args)[0])
            else:
                answer = getattr(runners[number], method)(*args)
            pipe.send_bytes(pickle.dumps((False, answer)))
        except BaseException as error:
            pipe.send_bytes(pickle.dumps((True, _portable(error))))


def _portable(error: BaseException) -> BaseException:
    """An error as it is, where it survives the pipe; else one that has its words."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return LLMError(f"{type(error).__name__}: {error}")


@contextmanager
def runner_process() -> Iterator[Connection]:
    """A spawned process that serves runners."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
