"""A role for the tests of worker processes: does what it is told, in every way in which a worker can end."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from enum import Enum

from llm.workers.connection import Connection
from llm.workers.messages import Schema


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Point:
    x: int
    y: object = None


SCHEMA = Schema([Point, Colour])


def serve(connection: Connection, number: int) -> None:
    while (message := connection.receive()) is not None:
        kind, body = message
        if kind == "echo":
            connection.send("echo", body)
        elif kind == "who":
            main = sys.modules["__main__"].__file__
            connection.send("who", [number, os.getpid(), main, sorted(os.sched_getaffinity(0)), dict(os.environ)])
        elif kind == "print":
            print(body, flush=True)
            connection.send("printed")
        elif kind == "fail":
            raise RuntimeError(str(body))
        elif kind == "exit":
            os._exit(int(str(body)))
        elif kind == "hang":
            time.sleep(600)
        elif kind == "compute":
            end = time.monotonic() + float(str(body))
            while time.monotonic() < end:
                sum(range(10_000))
            connection.send("computed")
        elif kind == "flood":
            for _ in range(64):
                connection.send("flood", bytes(1 << 20))
