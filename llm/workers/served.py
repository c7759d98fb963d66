"""The worker's side: its role, and the thread that says that it computes and ends it with who started it."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable
from io import FileIO

from llm.base import system
from llm.errors import RankError, WorkerDiedError
from llm.workers.connection import BEAT, Connection
from llm.workers.messages import Message, Schema
from llm.workers.process import FAILED

_BEAT_SECONDS = 1.0
# Processor time of the other threads between two beats from which on the worker counts as computing: little, for a busy
# machine may leave it no more.
_COMPUTES = 0.0002
# That a role has for its clean-up after the program has gone.
_END_SECONDS = 2.0


class ServedConnection(Connection):
    """The connection of a worker, which beats while the role is not waiting for a message.

    A role that waits for something else, computing nothing, is silent, and is taken for hung after a while.
    """

    def __init__(self, end: socket.socket, schema: Schema) -> None:
        super().__init__(end, schema)
        self._waits = False
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def receive(self, seconds: float | None = None) -> Message | None:
        self._waits = True
        try:
            return super().receive(seconds)
        finally:
            self._waits = False

    def _beat(self) -> None:
        computed = _computed_by_others()
        while True:
            time.sleep(_BEAT_SECONDS)
            now = _computed_by_others()
            if not self._waits and now - computed > _COMPUTES:
                try:
                    self.send(BEAT)
                except EOFError:
                    return
            computed = now


def _computed_by_others() -> float:
    """Seconds of processor time of all threads but this one."""
    return time.process_time() - time.thread_time()


def _leave_with(program: FileIO, folder: str) -> None:
    """End this process soon after the program that started it, whatever its role is in the middle of."""
    program.read()  # returns at the end
    _delete(folder)
    time.sleep(_END_SECONDS)
    os._exit(1)


def _delete(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def serve_role(role: str, number: int, folder: str) -> None:
    """Run a role until the program that started this one closes its end, or the role fails.

    Standard input is the program's: a line that says which socket is this worker's, and then nothing until its end.

    Args:
        folder: of the program, deleted when it is gone; "": none.
    """
    program = FileIO(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    exported = bytes.fromhex(program.readline().decode())
    if not exported:
        _delete(folder)
        return  # the program is gone
    threading.Thread(target=_leave_with, args=(program, folder), name="end of the program", daemon=True).start()
    connection = ServedConnection(system.import_socket(exported), Schema())
    try:
        module = importlib.import_module(role)  # may take long, so it beats already
        connection.schema = module.SCHEMA
        serve: Callable[[Connection, int], None] = module.serve
        serve(connection, number)
    except EOFError:
        _delete(folder)  # the program is gone, or has closed its end
    except (WorkerDiedError, RankError) as error:  # of processes that this one started; the words say all
        connection.send(FAILED, str(error))
        raise SystemExit(1) from None
    except BaseException:
        connection.send(FAILED, traceback.format_exc())
        raise SystemExit(1) from None
