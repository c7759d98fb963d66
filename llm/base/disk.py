"""Writing to disk: waiting until it has what was written, and the folder that a save writes before it has its name.

A lock tells a save at work from a killed one; what killed saves left is removed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llm.base import system

# `tempfile` adds eight characters.
_LEFTOVER = re.compile(r"\..+\.partial-[a-z0-9_]{8}")


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, locked while it is written; removed at the end unless it was renamed."""
    _remove_leftovers(path.parent)
    partial, lock = _new_locked(path)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_leftovers(parent: Path) -> None:
    """Remove this user's partial folders in `parent` that no process holds the lock of."""
    for folder in parent.iterdir():
        if _LEFTOVER.fullmatch(folder.name) and system.is_own(folder.lstat()):
            lock = _try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _new_locked(path: Path) -> tuple[Path, int | None]:
    """A new folder and its lock; None where the file system has no locks, and nothing is ever removed."""
    while True:
        partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
        lock = _try_lock(partial)
        if partial.exists():  # another save may have taken it for a leftover before it was locked
            return partial, lock
        if lock is not None:
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process does, or there can be no lock."""
    handle = system.open_folder(folder)
    if handle is None:
        return None
    try:
        system.lock(handle)
    except OSError:
        os.close(handle)
        return None
    return handle
