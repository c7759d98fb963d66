"""The program of a worker process, which `process.py` starts as a file: its path is set before it imports anything."""

from __future__ import annotations

import json
import signal
import sys


def main(role: str, number: int, cores: list[int] | None, path: list[str], folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    sys.path[:] = path
    if cores is not None:
        # Before anything is allocated, so that memory is taken from the node of these processors.
        from llm.base import system

        system.limit_cores(cores)
    from llm.workers.served import serve_role

    serve_role(role, number, folder)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
