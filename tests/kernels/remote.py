"""Kernels compiled for aarch64, called from this x86-64 process: a program under qemu-user runs them on copies of the
tensors.

`RemoteLibrary` is a `Library` whose calls travel through a pipe to remote.cpp with the memory they point to.
It compiles for aarch64. On Debian: `apt-get install g++-aarch64-linux-gnu qemu-user-static`.
"""

from __future__ import annotations

import bisect
import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import torch

from llm.kernels.cpu import build, library
from llm.kernels.cpu.memory import Pool, eighths
from llm.kernels.cpu.signatures import KERNELS, Signature, WeightStruct

DRIVER = Path(__file__).with_suffix(".cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SYSTEM = "/usr/aarch64-linux-gnu"  # where the compiler's package has its C library
IN_SLOTS = -1
FIRST_ADDRESS = 1 << 12  # below it is what was added to the null address of an empty tensor: never read

# Start -> bytes of the storages whose address was asked for, and the starts in order.
storages: dict[int, int] = {}
starts: list[int] = []
_data_ptr = torch.Tensor.data_ptr


def data_ptr(tensor: torch.Tensor) -> int:
    """`Tensor.data_ptr`, which also notes the tensor's storage. A later storage replaces those it overlaps."""
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    if size and storages.get(start) != size:
        at = bisect.bisect_left(starts, start)
        while at and starts[at - 1] + storages[starts[at - 1]] > start:
            at -= 1
        while at < len(starts) and starts[at] < start + size:
            del storages[starts.pop(at)]
        bisect.insort(starts, start)
        storages[start] = size
    return _data_ptr(tensor)


def storage_around(address: int) -> tuple[int, int]:
    """(start, bytes) of the noted storage that `address` points into."""
    at = bisect.bisect_right(starts, address) - 1
    if at < 0 or address > starts[at] + storages[starts[at]]:
        raise LookupError(f"{address:#x} is not in the memory of a tensor whose address was asked for")
    return starts[at], storages[starts[at]]


def missing() -> str:
    """What is not installed here; "" if nothing is."""
    return " and ".join(name for name in (COMPILER, EMULATOR) if shutil.which(name) is None)


def driver_of(path: Path) -> Path:
    return path.with_suffix(".driver")


def compile_remote(path: Path, target: str) -> None:
    """The library of `target` at `path`, and its driver beside it."""
    command = [COMPILER, "-std=c++17", "-O1", str(DRIVER), "-o", str(driver_of(path)), "-ldl"]
    subprocess.run(command, check=True)
    build.compile_library(path, target, COMPILER)


class Call:
    """One call as it travels: slots, regions and the places of addresses in both."""

    def __init__(self, kernel: Signature, slots: bytes) -> None:
        self.kernel = kernel
        self.slots = slots
        self.regions: dict[tuple[int, int], list[int]] = {}  # (start, bytes) -> [number, is written]
        self.patches: list[tuple[int, int, int, int]] = []
        values = struct.unpack(f"={len(slots) // 8}q", slots)
        for index, (kind, value) in enumerate(zip(kernel.types[1:], values, strict=True)):
            if "*" in kind and value >= FIRST_ADDRESS:
                if kind == "const Weight*":
                    self.add_weights(index, value, values[2] if kernel.name in ("llm_experts", "llm_lora") else 1)
                else:
                    self.add(IN_SLOTS, 8 * index, value, not kind.startswith("const "))

    def region(self, start: int, size: int, is_written: bool) -> int:
        entry = self.regions.setdefault((start, size), [len(self.regions), 0])
        entry[1] |= is_written
        return entry[0]

    def add(self, holder: int, at: int, address: int, is_written: bool) -> None:
        start, size = storage_around(address)
        self.patches.append((holder, at, self.region(start, size, is_written), address - start))

    def add_weights(self, index: int, address: int, count: int) -> None:
        size = ctypes.sizeof(WeightStruct)
        number = self.region(address, count * size, False)
        self.patches.append((IN_SLOTS, 8 * index, number, 0))
        for which in range(count):
            weight = WeightStruct.from_address(address + which * size)
            for name, kind in WeightStruct._fields_:
                if kind is ctypes.c_void_p and getattr(weight, name):
                    # Of an empty weight the packed data are never read, and have no storage.
                    at = which * size + getattr(WeightStruct, name).offset
                    self.add(number, at, getattr(weight, name), self.kernel.name == "llm_pack")

    def message(self) -> bytes:
        name = self.kernel.name.encode()
        parts = [struct.pack("=q", len(name)), name, struct.pack("=q", len(self.slots) // 8), self.slots]
        parts.append(struct.pack("=q", len(self.regions)))
        for (start, size), (_, is_written) in self.regions.items():
            parts += [struct.pack("=3q", start % 64, size, is_written), ctypes.string_at(start, size)]
        parts.append(struct.pack("=q", len(self.patches)))
        return b"".join([*parts, *(struct.pack("=4q", *patch) for patch in self.patches)])


class RemoteLibrary(library.Library):
    """The library at `path`, for aarch64, in a process of its own."""

    def __init__(self, target: str, path: Path) -> None:
        self.target, self.path = target, path
        torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
        command = [EMULATOR, "-L", SYSTEM, str(driver_of(path)), str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.entries = {kernel: lambda slots, kernel=kernel: self.travel(kernel, slots) for kernel in KERNELS.values()}
        self._float32 = torch.empty(0, dtype=torch.float32)
        self.pool = Pool(0, eighths, lambda address, nbytes: None)

    def function(self, name: str) -> Any:
        return lambda *arguments: None  # huge pages, ending threads: of no effect on results

    def travel(self, kernel: Signature, slots: bytes) -> int:
        call = Call(kernel, slots)
        sent, answered = self.process.stdin, self.process.stdout
        assert sent is not None and answered is not None
        sent.write(call.message())
        sent.flush()
        result = self.read(8)
        for (start, size), (_, is_written) in call.regions.items():
            if is_written:
                ctypes.memmove(start, self.read(size), size)
        return int(struct.unpack("=q", result)[0])

    def read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        found = self.process.stdout.read(count)
        if len(found) != count:
            raise RuntimeError(f"the kernels of {self.target} ended with status {self.process.wait()}")
        return found
