"""The memory and CPU limits of this process: its control groups' (versions 1 and 2), and its own (`ulimit -v`, `-d`).

Each group from the process's own up to the root may set a limit, so all are read and the smallest applies. Paths are
relative to `root`, "/" outside of tests. `explain_memory_errors` turns errors of many kinds into one sentence.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llm.base import system
from llm.errors import LLMError, OutOfMemoryError

# Version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """`limit` and `used` in bytes; reclaimable page cache does not count as used."""

    limit: int
    used: int


def memory_limits(root: Path) -> list[MemoryLimit]:
    """All memory limits of this process."""
    found = []
    for version, folder in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and limit < _NO_LIMIT:
            droppable = _statistics(folder).get("inactive_file" if version == 2 else "total_inactive_file", 0)
            found.append(MemoryLimit(limit, max(0, (used or 0) - droppable)))
    return found + _own_limits(root)


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes of the host's memory that the process may use, and how many of them are free."""
    total, free = system.memory(root)
    limits = memory_limits(root)
    left = [max(0, found.limit - found.used) for found in limits]
    return min([total, *(found.limit for found in limits)]), min([free, *left])


# What PyTorch, Python and Rust say in errors of other types.
_LACK = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "can't start new thread", "ENOMEM")


@contextmanager
def explain_memory_errors(what: str) -> Iterator[None]:
    """A context, or a decorator, in which errors that mean a lack of memory, or of room for a thread, become
    an `OutOfMemoryError`: there is not enough to `what`."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, LLMError) or not _is_lack(error):
            raise
        said = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        raise OutOfMemoryError(
            f"there is not enough memory to {what} ({said}){_limit_said()}; free some, or lower kv_cache_memory_bytes, "
            "max_num_seqs or num_threads."
        ) from error


def _is_lack(error: BaseException) -> bool:
    is_known = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return is_known or any(words in str(error) for words in _LACK)


def _limit_said() -> str:
    said = [f"ulimit {option} is {limit} bytes" for option, limit in system.address_limits().items()]
    return ", and " + ", ".join(said) if said else ""


def _own_limits(root: Path) -> list[MemoryLimit]:
    """Those that `setrlimit` set, of the address space and of private memory."""
    found = []
    for option, limit in system.address_limits().items():
        name = {"-v": "VmSize", "-d": "VmData"}[option]
        lines = (_text(root / "proc/self/status") or "").splitlines()
        used = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]
        found.append(MemoryLimit(limit, sum(used)))
    return found


def cpu_quota(root: Path) -> float | None:
    """CPU time limit in processors (1.5: one and a half), None: no limit."""
    quotas = []
    for version, folder in _groups(root, "cpu"):
        if version == 2:
            quota, period = (_text(folder / "cpu.max") or "max 1").split()
        else:
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "0"
        if quota != "max" and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's group for a controller and of each group above it, the deepest first.

    In a container its own group is the root of the mount, while /proc may still show the host's path. So folders that
    do not exist are skipped, and the root of the mount is always read.
    """
    mounts = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, bases = 2, [mounts / "unified", mounts]
        elif controller in controllers.split(","):
            version, bases = 1, [mounts / controllers, mounts / controller]
        else:
            continue
        base = next((base for base in bases if base.is_dir()), None)
        if base is not None:
            folder = base / path.strip("/")
            yield from ((version, each) for each in (folder, *folder.parents) if each.is_relative_to(base))


def _text(path: Path) -> str | None:
    """A file's text, None if it is missing or not readable."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return None if text in (None, "", "max") else int(text)


def _statistics(folder: Path) -> dict[str, int]:
    lines = (_text(folder / "memory.stat") or "").splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}
