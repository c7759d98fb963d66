"""What the library asks of the operating system, and what takes its place where a system has not got it.

Linux has all of it, macOS no affinity and no control groups, Windows no signals of time, file locks of its own, sockets
that are no files, and no folders that can be synced. Standard library alone, and psutil where there is no Linux:
`kernels/cpu/build.py` uses this while a wheel is built.

`partial_folder` is the folder that a save writes before it has its name. A lock tells a save at work from a killed one,
whose folders are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def _module(name: str) -> ModuleType | None:
    """A module of the standard library that some systems have not got."""
    try:
        return __import__(name)
    except ImportError:
        return None


_fcntl, _msvcrt, _pwd, _resource = (_module(name) for name in ("fcntl", "msvcrt", "pwd", "resource"))
HUGE_PAGE = 2 << 20  # of x86-64, and of ARM with pages of 4 KiB
# Windows refuses to rename over a file that is open for a moment, by an indexer or a scanner.
_RENAMES, _RENAME_SECONDS = 10, 0.1


def cores() -> set[int]:
    """The processors that this process may run on; all of them where the system has no affinity."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(range(os.cpu_count() or 1)) if affinity is None else affinity(0)


def limit_cores(cores: Iterable[int]) -> None:
    """Let this process run on these processors alone; nothing where the system has no affinity."""
    affinity = getattr(os, "sched_setaffinity", None)
    if affinity is not None:
        affinity(0, cores)


def search_path() -> list[str]:
    """`sys.path` for another process, whose working folder may be another."""
    return [entry or os.getcwd() for entry in sys.path]


def lock(descriptor: int, wait: bool = False) -> None:
    """Hold an open file's lock against other processes; the system releases it when the file is closed.

    Raises OSError where another process holds it (unless `wait`), or where the file system has no locks.
    """
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | (0 if wait else _fcntl.LOCK_NB))
    elif _msvcrt is not None:
        # It locks bytes against reading too: one far behind any content.
        os.lseek(descriptor, 1 << 40, os.SEEK_SET)
        while True:
            try:
                _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
                break
            except OSError:
                if not wait:
                    raise
                time.sleep(_RENAME_SECONDS)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        raise OSError("this system has no file locks")


def unlock(descriptor: int) -> None:
    """Let go of a lock of Unix's."""
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_UN)


def unix_socket() -> socket.socket:
    """Raises OSError where the system has none."""
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise OSError("this system has no Unix sockets")
    return socket.socket(family)


def is_readable(end: socket.socket, seconds: float) -> bool:
    """Whether a socket has something to read, or its end, within so many seconds."""
    if not hasattr(select, "poll"):
        return bool(select.select([end], [], [], seconds)[0])
    poll = select.poll()  # `select` takes no descriptors above 1,023
    poll.register(end, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def inherited_fds(end: socket.socket) -> list[int]:
    """`pass_fds` of `subprocess.Popen`: a process started with it may take the socket over."""
    return [] if os.name == "nt" else [end.fileno()]


def export_socket(end: socket.socket, process: int) -> bytes:
    """Bytes from which the process, started with `inherited_fds`, makes the socket."""
    share: Callable[[int], bytes] | None = getattr(end, "share", None)
    return str(end.fileno()).encode() if share is None else share(process)


def import_socket(exported: bytes) -> socket.socket:
    """The socket of `export_socket`, in the other process."""
    share: Callable[[bytes], socket.socket] | None = getattr(socket, "fromshare", None)
    return socket.socket(fileno=int(exported)) if share is None else share(exported)


def after_fork(call: Callable[[], object]) -> None:
    """Have this called in forked children, before anything else runs there; it cannot be taken back."""
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(after_in_child=call)


def mapped(size: int) -> mmap.mmap:
    """So many bytes of memory of this process, which is the system's again once nothing refers to them."""
    # Private, where a system has it: huge pages need it.
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(1, size), **kind)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages; only speed depends on it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_ahead() -> Callable[[int, int], object] | None:
    """Has the system begin to read mapped bytes, by their address and number; None where it cannot be asked."""
    advise = c_function("madvise")
    if advise is None:
        return None
    return lambda address, nbytes: advise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_WILLNEED)


def open_folder(folder: Path) -> int | None:
    """A descriptor of the folder, for a lock; None where there is no such folder, or the system opens none."""
    if not hasattr(os, "O_DIRECTORY"):
        return None
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder: Windows writes those with the files."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which gets its name when the disk has it; removed if that fails."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        yield fresh
        sync(fresh)
        replace(fresh, path)
        sync(path.parent)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def deletes_open_files() -> bool:
    """Whether a file that is mapped can be deleted, and lives until it is mapped no more."""
    return os.name != "nt"


def replace(source: Path | str, target: Path | str) -> None:
    """Rename over `target`, at once for whoever reads it."""
    for left in reversed(range(_RENAMES)):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or not left:
                raise
            time.sleep(_RENAME_SECONDS)


def is_own(stat: os.stat_result) -> bool:
    """Whether this process's user owns the file; Windows tells of no users, and keeps a home folder to its user."""
    return not hasattr(os, "getuid") or stat.st_uid == os.getuid()


def is_private(stat: os.stat_result) -> bool:
    """Whether the file belongs to this user or root, and no other user can write to it."""
    return not hasattr(os, "getuid") or (stat.st_uid in (0, os.getuid()) and not stat.st_mode & 0o022)


def home() -> str:
    """The user's home folder as HOME names it or the system knows it, "" if there is none."""
    return os.environ.get("HOME") or home_of_user()


def home_of_user() -> str:
    if _pwd is None:
        return os.environ.get("USERPROFILE", "")
    try:
        return str(_pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return ""


def address_limits() -> dict[str, int]:
    """What `ulimit` allows this process: the option ("-v": addresses, "-d": private memory) -> bytes."""
    if _resource is None:
        return {}
    kinds = {"-v": _resource.RLIMIT_AS, "-d": _resource.RLIMIT_DATA}
    limits = {option: int(_resource.getrlimit(kind)[0]) for option, kind in kinds.items()}
    return {option: limit for option, limit in limits.items() if limit != _resource.RLIM_INFINITY}


def involuntary_switches() -> int | None:
    """How often another program took the core of this thread; None where the system does not count that by thread."""
    kind = getattr(_resource, "RUSAGE_THREAD", None)
    return None if _resource is None or kind is None else int(_resource.getrusage(kind).ru_nivcsw)


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes of the machine's memory, and how many of them are free or can be freed. `root`: another for tests."""
    table = root / "proc/meminfo"
    if not table.exists():
        import psutil

        found = psutil.virtual_memory()
        return int(found.total), int(found.available)
    pairs = (line.split(":") for line in table.read_text().splitlines())
    stated = {name: int(rest.split()[0]) * 1024 for name, rest in pairs}
    return stated["MemTotal"], stated["MemAvailable"]


def disk_free(path: Path) -> int:
    """Bytes that this user can still write to the disk of `path`."""
    return shutil.disk_usage(path).free


def write_all(descriptor: int, data: object, offset: int) -> None:
    """Write the bytes of a buffer at `offset`."""
    left = memoryview(data)  # type: ignore[arg-type]
    while left:
        if hasattr(os, "pwrite"):
            count = os.pwrite(descriptor, left, offset)
        else:
            os.lseek(descriptor, offset, os.SEEK_SET)
            count = os.write(descriptor, left)
        left, offset = left[count:], offset + count


def has_unnamed_files() -> bool:
    """Whether there are files in memory without a name: Linux has them."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def unnamed_file(name: str, size: int) -> int:
    """A descriptor of a file of zeros in memory, gone with the last process that has it open. `name` is for who looks
    into /proc."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, size)
    return descriptor


def map_over(address: int, size: int, descriptor: int, protection: int, flags: int) -> None:
    """Map a file over addresses that are this process's; raises OSError. Linux's."""
    function: Callable[..., int | None] = ctypes.CDLL(None, use_errno=True).mmap
    function.restype, fixed = ctypes.c_void_p, 0x10  # type: ignore[attr-defined]
    given = ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags | fixed, descriptor, ctypes.c_long(0)
    if function(*given) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def join_pages(address: int, size: int) -> bool:
    """Have Linux (6.1 and newer) put mapped pages of a file in memory together to huge ones, whatever its settings say.
    Only speed depends on it; False: some stay as they are."""
    advise, collapse = c_function("madvise"), 25
    whole = ctypes.c_size_t(-(-size // HUGE_PAGE) * HUGE_PAGE)
    return advise is not None and advise(ctypes.c_void_p(address), whole, collapse) == 0


def wait_for_disk(descriptor: int) -> None:
    """Wait until the disk has a file's content."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def c_function(name: str) -> Callable[..., object] | None:
    """A function of the C library; None where it has none of this name. Windows has none of those that are used."""
    return None if os.name == "nt" else getattr(ctypes.CDLL(None), name, None)


def unload(handle: int) -> None:
    """Unload a library: another file with its name can be loaded then."""
    if sys.platform == "win32":
        ctypes.WinDLL("kernel32").FreeLibrary(ctypes.c_void_p(handle))
    else:
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


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
        if _LEFTOVER.fullmatch(folder.name) and is_own(folder.lstat()):
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
    handle = open_folder(folder)
    if handle is None:
        return None
    try:
        lock(handle)
    except OSError:
        os.close(handle)
        return None
    return handle
