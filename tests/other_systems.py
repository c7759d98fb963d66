"""macOS and Windows, as far as a Linux machine can stand for them: what they lack is hidden from the library's code.

    python tests/other_systems.py win32 tests/jobs          # pytest, with the library on what looks like Windows
    python tests/other_systems.py darwin tests/config tests/setup

`pretend(system)` comes before the first import of `llm`. Its modules then import views of `os`,
`signal`, `mmap`, `sys` and `ctypes` without the calls that the system has not got, and with its name, and find no /proc
and no /sys; other packages, and tests, keep the real ones. Calls of Windows' own are stood in for, it deletes no file
that is open, and the kernels are installed as a wheel installs them. Interpreters that are started from then on pretend
as well.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import io
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# What macOS has not got, of what a Linux's Python has.
NO_MAC = {
    "os": (
        "sched_getaffinity sched_setaffinity fdatasync posix_fadvise posix_fallocate memfd_create O_TMPFILE pidfd_open "
        "eventfd"
    ),
    "mmap": "MADV_HUGEPAGE MAP_POPULATE MADV_POPULATE_WRITE",
    "signal": "sigtimedwait SIGRTMIN pidfd_send_signal",
    "select": "epoll POLLRDHUP",
}
NO_WINDOWS = {
    "os": (
        "fork register_at_fork getuid geteuid getgid pread pwrite preadv pwritev mkfifo setsid killpg nice "
        "getloadavg sysconf statvfs uname chown O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_CLOEXEC EX_OK wait3 wait4 pipe2 "
        "getpgid getsid set_blocking"
    ),
    "mmap": "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON MADV_WILLNEED MADV_DONTNEED MADV_SEQUENTIAL PROT_READ",
    "signal": (
        "SIGALRM SIGPROF SIGXCPU SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGPIPE SIGCHLD setitimer alarm ITIMER_PROF "
        "ITIMER_REAL pthread_kill pthread_sigmask sigwait siginterrupt"
    ),
    "select": "poll POLLIN POLLOUT POLLHUP",
    "socket": "AF_UNIX MSG_DONTWAIT recv_fds send_fds",
}
NO_MODULES = {
    "darwin": (),
    "win32": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline"),
}
_REAL_IMPORT = builtins.__import__


# Windows compiles no kernels: this machine's are installed as a wheel for Windows would install its own.
_INSTALL_KERNELS = """
import sys
from pathlib import Path
from llm.kernels.cpu import build, library

isa = library.requested_isa()
if isa != "none":
    target, _ = library.choose_target(isa, build.flags_of_torch())
    folder = Path(sys.argv[1], "llm", "kernels", "cpu", build.PACKAGED_FOLDER.name)
    folder.mkdir(parents=True)
    (folder / build.packaged_name(target)).symlink_to(build.ensure_library(target))
"""
# The system that other interpreters of this program are to pretend to be.
_TOLD = "PRETENDED_SYSTEM"
_AT_START = """
import os, sys
if os.environ.get({told!r}):
    sys.path.append({tests!r})
    import other_systems
    other_systems.pretend(os.environ[{told!r}])
"""


class View(ModuleType):
    """A module without some of its names, and with others in the place of some."""

    def __init__(self, module: ModuleType, hidden: set[str], changed: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self).update(_module=module, _hidden=hidden, **changed)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this system")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._module) if name not in self._hidden]


def _locking(descriptor: int, mode: int, nbytes: int) -> None:
    """msvcrt's: of bytes from the descriptor's position on, refused at once where they are locked."""
    flags = fcntl.LOCK_UN if mode == _MSVCRT.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
    fcntl.flock(descriptor, flags)
    assert nbytes == 1 and os.lseek(descriptor, 0, os.SEEK_CUR) >= 1 << 40  # behind every content


_MSVCRT = SimpleNamespace(locking=_locking, LK_NBLCK=2, LK_UNLCK=0)


class _Socket(socket.socket):
    """Windows': another process gets it by bytes that were made for it, here the path of a socket that gives it."""

    def share(self, process_id: int) -> bytes:
        path = f"{tempfile.mkdtemp()}/for-{process_id}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        own = self.dup()

        def hand_over() -> None:
            with listening, own, listening.accept()[0] as taker:
                socket.send_fds(taker, [b"."], [own.fileno()])
            shutil.rmtree(Path(path).parent)

        threading.Thread(target=hand_over, daemon=True).start()
        return path.encode()


def _socketpair() -> tuple[_Socket, _Socket]:
    one, other = socket.socketpair()
    return _Socket(fileno=one.detach()), _Socket(fileno=other.detach())


def _fromshare(info: bytes) -> socket.socket:
    assert f"for-{os.getpid()}" in info.decode()
    with socket.socket(socket.AF_UNIX) as giver:
        giver.connect(info.decode())
        return _Socket(fileno=socket.recv_fds(giver, 1, 1)[1][0])


class _Popen(subprocess.Popen[Any]):
    """Windows' hands no descriptors over."""

    def __init__(self, *arguments: Any, creationflags: int = 0, start_new_session: bool = False, **named: Any) -> None:
        assert not named.get("pass_fds")
        super().__init__(*arguments, start_new_session=creationflags == _NEW_GROUP, **named)


_NEW_GROUP = 0x200


def _win_dll(name: str) -> Any:
    assert name == "kernel32"
    return SimpleNamespace(FreeLibrary=ctypes.CDLL(None).dlclose)


def _replace(source: Any, target: Any) -> None:
    """Windows' for a file that a scanner has open: refused at the first try."""
    now = time.monotonic()
    first = _REFUSED.setdefault(str(target), now)
    if first == now:
        raise PermissionError(13, "The process cannot access the file because it is being used by another process")
    del _REFUSED[str(target)]
    os.replace(source, target)


_REFUSED: dict[str, float] = {}


def _views(system: str) -> dict[str, ModuleType]:
    import mmap
    import signal

    hidden = {name: set(words.split()) for name, words in NO_MAC.items()}
    changed: dict[str, dict[str, Any]] = {"sys": {"platform": system}, "os": {}, "ctypes": {}}
    if system == "win32":
        hidden = {name: words | set(NO_WINDOWS[name].split()) for name, words in hidden.items()}
        changed["os"] = {"name": "nt", "replace": _replace}
        changed["ctypes"] = {"WinDLL": _win_dll}
        changed["socket"] = {"socketpair": _socketpair, "fromshare": _fromshare}
        changed["subprocess"] = {"Popen": _Popen, "CREATE_NEW_PROCESS_GROUP": _NEW_GROUP}
    name = {"darwin": "Darwin", "win32": "Windows"}[system]
    changed["platform"] = {"system": lambda: name}
    modules = (os, mmap, signal, sys, ctypes, platform, select, socket, subprocess)
    return {m.__name__: View(m, hidden.get(m.__name__, set()), changed.get(m.__name__, {})) for m in modules}


def _keep_open_files() -> None:
    """Windows deletes no file that is open or mapped: for the library, by way of the standard library too."""
    real_unlink = os.unlink

    def unlink(path: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(path, (str, Path)) and not named and _asked_by_library(2) and _is_open(os.path.realpath(path)):
            message = "The process cannot access the file because it is being used by another process"
            raise PermissionError(13, message, str(path))
        real_unlink(path, *arguments, **named)

    os.unlink = unlink


def _is_open(path: str) -> bool:
    opened = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return path in map(os.path.realpath, opened) or f" {path}\n" in Path("/proc/self/maps").read_text()


def _asked_by_library(callers: int) -> bool:
    """Whether the library made the call that so many frames are in between, maybe through the standard library."""
    frame = sys._getframe(callers)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in sys.stdlib_module_names:
        frame = frame.f_back
    return _is_of_library(frame.f_globals)


def _hide_folders() -> None:
    """/proc and /sys: from the library's `open` and `stat`, its own and those by way of the standard library."""
    real_open, real_stat = io.open, os.stat

    def is_hidden(path: Any) -> bool:
        return isinstance(path, (str, Path)) and str(path).startswith(("/proc/", "/sys/")) and _asked_by_library(3)

    def stat(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real_stat(path, *arguments, **named)

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real_open(path, *arguments, **named)

    os.stat = stat
    io.open = builtins.open = opened


def pretend(system: str) -> None:
    """From now on the modules of `llm` are on "darwin" or "win32"."""
    assert not any(name == "llm" or name.startswith("llm.") for name in sys.modules), "llm is imported already"
    views, missing = _views(system), NO_MODULES[system]
    memory = SimpleNamespace(total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    memory.available = memory.total // 2
    psutil = SimpleNamespace(virtual_memory=lambda: memory)

    def imported(name: str, spaces: Any = None, *rest: Any, **named: Any) -> Any:
        caller = spaces if spaces is not None else sys._getframe(1).f_globals
        if not _is_of_library(caller):
            return _REAL_IMPORT(name, spaces, *rest, **named)
        if name in missing:
            raise ImportError(f"no module named {name!r} on this system", name=name)
        if name == "msvcrt" and system == "win32":
            return _MSVCRT
        if name == "psutil":
            return psutil
        found = views.get(name)
        return _REAL_IMPORT(name, spaces, *rest, **named) if found is None else found

    builtins.__import__ = imported
    _hide_folders()
    if system == "win32":
        _keep_open_files()
    if os.environ.get(_TOLD) != system:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        site = os.path.join(folder, "site-packages")
        if system == "win32":
            modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            install = [sys.executable, "-c", _INSTALL_KERNELS, site]
            subprocess.run(install, check=True, env={**os.environ, "PYTHONPATH": modules})
            sys.path.append(site)
        at_start = _AT_START.format(told=_TOLD, tests=str(Path(__file__).parent))
        Path(folder, "sitecustomize.py").write_text(at_start)
        entries = (folder, os.environ.get("PYTHONPATH"), site)
        os.environ.update({_TOLD: system, "PYTHONPATH": os.pathsep.join(filter(None, entries))})


def _is_of_library(caller: dict[str, Any]) -> bool:
    """Of the package `llm`, or one of its files that is run as a program."""
    name = str(caller.get("__name__", ""))
    return name.partition(".")[0] == "llm" or (name == "__main__" and "/llm/" in str(caller.get("__file__", "")))


if __name__ == "__main__":
    import pytest

    pretend(sys.argv[1])
    sys.exit(pytest.main(sys.argv[2:]))
