"""Compiling the CPU kernels: once per machine, into a per-user cache, or into the wheel when the package is built.

A target is an instruction set and its flags. PyTorch is not imported: setup.py loads this file by its path.

The file name of a library contains a hash of its sources, compiler and flags, so a cached file is used only for
exactly these. Compilation happens in a scratch folder under a lock and ends with an atomic rename: two processes build
once, and a killed build leaves nothing that could be loaded. The compilers hold the lock too: those that a killed
process leaves behind are waited for. Nothing is given up because other programs take the processor.

A library file ends with its size and digest, checked before it is loaded: loading a truncated one would crash the
process. The cache is used only if no other user can write to it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from llm.base import system

SOURCE_FOLDER = Path(__file__).resolve().parent
# The folder of a wheel's compiled libraries, beside the sources.
PACKAGED_FOLDER = SOURCE_FOLDER / "compiled"
# What folders of installed packages are called; Debian has the second.
_INSTALLED = ("site-packages", "dist-packages")

# No fast-math and no contraction: every operation rounds as the source says.
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-fast-math -fno-exceptions -fno-rtti -Wall -Wextra"
).split()
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
# On aarch64 gcc moves loads ahead of the products before them, and spills the sums; on x86-64 it does not by itself.
_UNSCHEDULED = ("-fno-schedule-insns",)
# Target -> flags, slowest first.
TARGETS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": _AVX2,
    "avx2_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "avx512_bf16": _BF16,
    "amx": (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "neon": ("-march=armv8.2-a+dotprod", *_UNSCHEDULED),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm", *_UNSCHEDULED),
}
_CPU_FLAGS = {
    "plain": "",
    "avx2": "avx2 fma f16c",
    "avx2_vnni": "avx2 fma f16c avx_vnni",
    "avx512": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq",
    "avx512_vnni": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni",
    "avx512_bf16": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16",
    "amx": "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
    "neon": "asimd asimddp",
    "neon_i8mm": "asimd asimddp i8mm",
}
# torch.cpu.get_capabilities' names of those whose names differ.
_TORCH_NAMES = {
    **{f"avx512_{part}": f"avx512{part}" for part in ("f", "bw", "vl", "dq")},
    **{"fma3": "fma", "neon": "asimd", "dot": "asimddp"},
}
# Golden Cove and its successors: outside AMX they multiply bfloat16 at half the rate of float32 (kernels/README.md).
_SLOW_BF16 = {"GenuineIntel", "avx512_fp16"}
_X86, _ARM = {"x86_64", "amd64"}, {"aarch64", "arm64"}
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA = 158, 0x1023, 18
_COMPILERS = ("c++", "g++", "clang++")
# CPU time of one compiler. It takes a few seconds for a file; on a busy machine those may last many minutes.
_CPU_SECONDS = 600
# A shell sets it: a function that runs between fork and exec may hang in a process with threads.
_LIMITED = ("/bin/sh", "-c", f'ulimit -S -t {_CPU_SECONDS} 2>/dev/null; exec "$@"', "sh")
_OUTPUT_SHOWN = 2000
# A library file ends with this mark and the SHA-256 and the size of all before the mark. ELF loaders ignore the rest.
_MARK = b"offline-llm kernels\0"
_SEAL_BYTES = len(_MARK) + 32 + 8


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why and what to do."""


def supported_targets(cpu_flags: set[str] | None = None) -> list[str]:
    """The targets that this processor supports, the fastest last."""
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    return [target for target, needed in _CPU_FLAGS.items() if flags.issuperset(needed.split())]


def fast_targets(cpu_flags: set[str] | None = None) -> list[str]:
    """`supported_targets` but those that are slower than the one before them."""
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    slow = {"avx512_bf16"} if flags.issuperset(_SLOW_BF16) else set()
    return [target for target in supported_targets(cpu_flags) if target not in slow]


def machine_targets() -> list[str]:
    """The targets of this machine's architecture, whether or not its processor supports them."""
    machine = platform.machine().lower()
    if machine in _ARM:
        return ["plain", *(target for target in TARGETS if target.startswith("neon"))]
    return [target for target in TARGETS if not target.startswith("neon")] if machine in _X86 else ["plain"]


def wheel_targets(wanted: str) -> list[str]:
    """The targets of a wheel: a comma-separated list, "all", or "" for the best of this processor.

    Where another machine's wheel lacks the best, it is compiled at first use; without a compiler, the best that the
    wheel carries and that processor runs is used.
    """
    if wanted == "all":
        return machine_targets()
    if wanted:
        return wanted.split(",")
    try:
        best = fast_targets()[-1]
    except ImportError:  # PyTorch alone knows this processor, and is not there while a wheel is built
        return []
    return [target for target in machine_targets() if target == best]


def read_cpu_flags() -> set[str]:
    """The processor features this process can use, by Linux's names, and the processor's vendor.

    Elsewhere than on Linux as PyTorch has them, and in an emulator, where Linux tells of the processor outside. Empty
    if it is neither x86-64 nor aarch64.
    """
    path, machine = Path("/proc/cpuinfo"), platform.machine().lower()
    if machine not in _X86 | _ARM:
        return set()
    flags = flags_in(path.read_text()) if path.exists() else set()
    if ("asimd" if machine in _ARM else "sse2") not in flags:  # every processor of the architecture has it
        return flags_of_torch()
    if "amx_tile" in flags and not request_tiles():
        flags = {flag for flag in flags if not flag.startswith("amx")}
    return flags


def flags_in(cpuinfo: str) -> set[str]:
    """The first processor's features and vendor; the features are called "flags" on x86-64, "Features" on aarch64."""
    first = cpuinfo.split("\n\n", 1)[0]
    lines = (line.split(":", 1) for line in first.splitlines() if line.startswith(("flags", "Features", "vendor_id")))
    return {word for _, words in lines for word in words.split()}


def flags_of_torch() -> set[str]:
    """What PyTorch knows of the processor, by Linux's names; nothing where it cannot tell. AMX is Linux's to grant."""
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    has = {
        _TORCH_NAMES.get(name, name)
        for name, value in capabilities.items()
        if value is True and not name.startswith("amx")
    }
    return has | ({"GenuineIntel"} if "Intel" in str(capabilities.get("cpu_name")) else set())


def request_tiles() -> bool:
    """Ask Linux to let all threads of this process use the AMX tile registers; True if it does."""
    return (
        sys.platform == "linux"
        and ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA) == 0
    )


def sources() -> list[Path]:
    return sorted(SOURCE_FOLDER.glob("*.cpp"))


def source_key() -> str:
    """A hash of all sources and flags; part of a packaged library's file name."""
    digest = hashlib.sha256(repr((FLAGS, TARGETS)).encode())
    for path in sorted((*SOURCE_FOLDER.glob("*.cpp"), *SOURCE_FOLDER.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> str:
    """The C++ compiler: $CXX, or the first of c++, g++ and clang++; raises `BuildError`, on Windows always."""
    if os.name == "nt":  # compilers are given flags, a lock and limits in the ways of other systems
        raise BuildError("on Windows no kernels are compiled; install a wheel for win_amd64, which has them")
    named = os.environ.get("CXX") or ""
    for name in (named, *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            if named and name != named:
                _warn_of_compiler(named, found)
            return found
    raise BuildError(
        "no C++ compiler was found; install one (Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), "
        "or name it in CXX"
    )


@functools.cache
def _warn_of_compiler(named: str, used: str) -> None:
    logging.getLogger("llm").warning("CXX=%r is no program that can be found; %s compiles the kernels.", named, used)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/offline-llm/kernels, by default under ~/.cache; raises `BuildError` if there is no home folder.

    A relative XDG_CACHE_HOME is ignored, as its specification says.
    """
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.join(system.home(), ".cache")
    if not os.path.isabs(base):
        raise BuildError("there is no folder for compiled kernels, as HOME is not set; set XDG_CACHE_HOME to one")
    return Path(base) / "offline-llm" / "kernels"


def packaged_name(target: str) -> str:
    """The file name of a wheel's library for exactly these sources."""
    return f"{target}-{source_key()}.so"


def packaged_library(target: str) -> Path | None:
    """The packaged library for exactly these sources, None if there is none.

    The folders of installed packages on sys.path are searched too: in a checkout, `python -m llm` imports the checkout,
    and an installed package that has compiled libraries comes later on the path. Code of those is not running yet, so
    nobody but this user and root may be able to write there.
    """
    own = PACKAGED_FOLDER / packaged_name(target)
    if is_whole(own):
        return own
    entries = [Path(entry) for entry in sys.path if os.path.isabs(entry) and Path(entry).name in _INSTALLED]
    found = (entry / "llm" / "kernels" / "cpu" / PACKAGED_FOLDER.name / own.name for entry in entries)
    return next((path for path in found if all(map(_is_safe, (path, *path.parents[:5]))) and is_whole(path)), None)


def cached_library(target: str, compiler: str, folder: Path | None = None) -> Path:
    """The path of `target` in the cache, whether or not the file exists."""
    # Path, size and time of the compiler identify its version: running it would cost a subprocess at every start.
    real = os.path.realpath(compiler)
    stat = os.stat(real)
    identity = f"{real}:{stat.st_size}:{stat.st_mtime_ns}:{platform.machine()}:{source_key()}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return (folder or cache_folder()) / f"{target}-{key}.so"


def ensure_library(
    target: str, *, announce: Callable[[str], None] | None = None, folder: Path | None = None, rebuild: bool = False
) -> Path:
    """The compiled library of `target`: packaged, cached, or compiled now.

    Args:
        announce: called with one line before a compilation starts, or before another process's is waited for; by
            default it is printed to standard error.
        folder: the cache, by default `cache_folder()`.
        rebuild: compile even if there is a library.

    Raises:
        BuildError: there is no compiler, it failed, the cache cannot be written, or other users can write to it.
    """
    packaged = None if rebuild else packaged_library(target)
    if packaged is not None:
        return packaged
    compiler = find_compiler()
    path = cached_library(target, compiler, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(path.parent)
        if not rebuild and is_usable(path):
            return path
        before = _time_of(path)
        with _locked(path.with_suffix(".lock"), lambda: _announce(_waiting(target), announce)) as lock:
            # Another process may have built it while this one waited.
            if not is_usable(path) or (rebuild and _time_of(path) == before):
                _announce(f"Compiling the CPU kernels ({target}), once, into {path.parent} ...", announce)
                _compile_into(path, target, compiler, lock)
    except OSError as error:
        raise BuildError(f"the kernel cache cannot be used ({error}); point XDG_CACHE_HOME elsewhere") from error
    return path


def compile_library(
    output: Path, target: str, compiler: str, extra_flags: tuple[str, ...] = (), lock: int | None = None
) -> None:
    """Compile the sources for `target` in parallel and link them into the shared library `output`.

    `lock`: a file that the compilers keep open.
    """
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="build-") as scratch:
        objects = [Path(scratch, f"{path.stem}.o") for path in sources()]
        flags = [*FLAGS, *TARGETS[target], *extra_flags]
        commands = [
            [compiler, *flags, "-c", str(path), "-o", str(out)] for path, out in zip(sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(system.cores())) as pool:
            list(pool.map(lambda command: _run(command, lock), commands))
        linked = Path(scratch, "library.so")
        # No OpenMP runtime is linked: the kernels have their own threads (threads.cpp).
        as_needed = ["-Wl,--as-needed"] if sys.platform == "linux" else []  # macOS's linker has no such option
        _run([compiler, "-shared", *extra_flags, *as_needed, *map(str, objects), "-o", str(linked)], lock)
        seal(linked)
        _replace(linked, output)


def is_usable(path: Path) -> bool:
    """True if the cached library is whole, belongs to this user or root, and no other user can write to it."""
    return _is_safe(path) and is_whole(path)


def _is_safe(path: Path) -> bool:
    try:
        return system.is_private(os.stat(path))
    except OSError:
        return False


def is_whole(path: Path) -> bool:
    """True if the library exists and ends with its correct size and digest."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _SEAL_BYTES and content[-_SEAL_BYTES:] == _seal_of(content[:-_SEAL_BYTES])


def seal(path: Path) -> None:
    """Append size and digest, and sync the file to disk: it is renamed after that."""
    with open(path, "r+b") as file:
        file.write(_seal_of(file.read()))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o755)


def _seal_of(content: bytes) -> bytes:
    return _MARK + hashlib.sha256(content).digest() + len(content).to_bytes(8, "little")


def _replace(source: Path, target: Path) -> None:
    """Rename, and sync the rename to disk."""
    system.replace(source, target)
    system.sync(target.parent)


def _check_private(folder: Path) -> None:
    """Raise `BuildError` for a folder into which another user could put a library."""
    if not system.is_private(os.stat(folder)):
        raise BuildError(
            f"the kernel cache {folder} belongs to another user, or others may write to it; make it your own and "
            "`chmod go-w` it, or point XDG_CACHE_HOME elsewhere"
        )


def _compile_into(path: Path, target: str, compiler: str, lock: int) -> None:
    # We hold the lock of this file, so scratch folders with its name are left from killed builds, and so are no
    # compilers. Those of other files may belong to running builds with other sources or another compiler.
    prefix = f"scratch-{path.stem}-"
    for stale in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
    try:
        compile_library(scratch / "library.so", target, compiler, lock=lock)
        _replace(scratch / "library.so", path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str], lock: int | None) -> None:
    """Run the compiler; raises `BuildError`, whose first line says in short what happened."""
    files = () if lock is None else (lock,)
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        done = subprocess.run(
            [*_LIMITED, *command], stdin=nothing, stdout=pipe, stderr=subprocess.STDOUT, pass_fds=files
        )
    except OSError as error:
        raise BuildError(f"the C++ compiler could not be run ({error})") from error
    if done.returncode:
        output = done.stdout.decode(errors="replace").strip()
        what = next((line for line in output.splitlines() if "error" in line), "") or _ending(done.returncode)
        raise BuildError(f"the C++ compiler failed: {what}\n{' '.join(command)}\n{output[:_OUTPUT_SHOWN]}".strip())


def _ending(status: int) -> str:
    """Of a compiler that says nothing of an error."""
    if status == -getattr(signal, "SIGXCPU", 0):
        return f"it took more than {_CPU_SECONDS} seconds of CPU time"
    return f"it was killed by signal {-status}" if status < 0 else f"it ended with status {status}"


def _announce(line: str, announce: Callable[[str], None] | None) -> None:
    if announce is not None:
        announce(line)
    else:
        print(line, file=sys.stderr, flush=True)


def _waiting(target: str) -> str:
    return f"Waiting for another process, which compiles the CPU kernels ({target}) ..."


def _time_of(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@contextmanager
def _locked(path: Path, waits: Callable[[], None]) -> Iterator[int]:
    """Hold an advisory lock, which the system releases when this process and the compilers it started are gone.

    `waits` is called before waiting for another process. Gives the lock's file descriptor.
    """
    with open(path, "w") as handle:
        try:
            system.lock(handle.fileno())
        except OSError:
            waits()
            system.lock(handle.fileno(), wait=True)
        yield handle.fileno()
