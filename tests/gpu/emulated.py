"""The kernels' own binaries for an AMD card (gfx1100), executed instruction by instruction, without a GPU.

    TINYGRAD=<a checkout of tinygrad/tinygrad> python tests/gpu/emulated.py [--only linear,experts] [--types bfloat16]

Needs Triton, clang, and the emulator of tinygrad's tests (`test/mockgpu`), which its wheel does not hold. Shows what
Triton's interpreter cannot: the compiler's rounding, layouts, masks and shared memory; a row alone against the row in a
batch. It shows nothing of races and speed, and knows neither `row_share` nor atomics: a kernel that reduces a row may
fail here and be right. Takes 10 to 100 s for the first launch of a kernel's form. Prints a line for each case of
`check.cases`; docs/reference/devices.md says what was found.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import struct
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, os.environ.get("TINYGRAD", ""))
os.environ.setdefault("DEV", "CPU")
os.environ.setdefault("AMDGCN_USE_BUFFER_OPS", "0")  # the emulator knows no loads through descriptors

import compile as forms
import torch
import triton
from triton.compiler import ASTSource

from llm.kernels.triton import attention, check, elementwise, gemm, moe, recurrent, vocabulary
from llm.kernels.triton import launch as launching
from llm.kernels.triton.backend import kernel, kernel_names

TARGET = launching.TARGETS["gfx1100"]
_SIZES = {"i32": ("i", 4), "i64": ("q", 8), "fp32": ("f", 4)}
# buffer_gl0_inv, a cache's invalidation, which the emulator does not know -> two s_nop.
_UNKNOWN, _NOTHING = bytes.fromhex("0000ace000000000"), bytes.fromhex("000080bf") * 2
# Fields of ELF64 and of a kernel descriptor: https://llvm.org/docs/AMDGPUUsage.html#kernel-descriptor
_LOAD, _SYMBOLS = 1, (2, 11)


class Binary:
    """A form of a kernel, loaded into memory as a GPU's driver would."""

    def __init__(self, form: forms.Form) -> None:
        pointers = {(index,): [["tt.divisibility", 16]] for index in form.divisible}
        source = ASTSource(form.kernel, dict(form.signature), dict(form.constants), pointers)
        self._built = triton.compile(source, target=forms._GPU[TARGET.name], options=dict(form.options))
        self._types = [kind for _, kind in form.signature if kind != "constexpr"]
        self._threads = 32 * self._built.metadata.num_warps
        self._load(self._built.asm["hsaco"])

    def _load(self, elf: bytes) -> None:
        def read(what: str, at: int) -> Any:
            return struct.unpack_from("<" + what, elf, at)

        (segments, sections), (size, count) = read("QQ", 0x20), read("HH", 0x36)
        loads = [read("IIQQQQQQ", segments + index * size) for index in range(count)]
        loads = [(offset, address, stored, length) for kind, _, offset, address, _, stored, length, _ in loads
                 if kind == _LOAD]  # fmt: skip
        self._memory = mmap.mmap(-1, max(address + length for _, address, _, length in loads) // 4096 * 4096 + 8192)
        for offset, address, stored, _ in loads:
            self._memory[address : address + stored] = elf[offset : offset + stored]
        self._skip_unknown()
        size, count = read("HH", 0x3A)
        headers = [read("IIQQQQIIQQ", sections + index * size) for index in range(count)]
        descriptors = [
            value
            for header in headers
            if header[1] in _SYMBOLS
            for name, _, _, _, value, _ in (read("IBBHQQ", header[4] + at) for at in range(0, header[5], 24))
            if elf[headers[header[6]][4] + name :].split(b"\0", 1)[0].endswith(b".kd")
        ]
        at = descriptors[0]
        own, self._scratch, self._arguments = struct.unpack_from("<III", self._memory, at)
        (entry,) = struct.unpack_from("<q", self._memory, at + 16)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._entry = base + at + entry
        (resources,) = struct.unpack_from("<I", self._memory, at + 52)
        shared = max(own, self._built.metadata.shared)
        self._resources = resources & ~(0x1FF << 15) | ((shared + 511) // 512) << 15

    def _skip_unknown(self) -> None:
        at = self._memory.find(_UNKNOWN)
        while at >= 0:
            self._memory[at : at + 8] = _NOTHING
            at = self._memory.find(_UNKNOWN, at + 8)

    def run(self, grid: tuple[int, ...], args: list[Any]) -> None:
        from test.mockgpu.amd.emu import run_asm

        layout, values = "<", []
        for kind, value in zip(self._types, args, strict=True):
            code, size = ("Q", 8) if kind.startswith("*") else _SIZES[kind]
            layout += "x" * (-struct.calcsize(layout) % size) + code
            values.append(value.data_ptr() if kind.startswith("*") else value)
        buffer = ctypes.create_string_buffer(struct.pack(layout, *values).ljust(self._arguments, b"\0"))
        x, y, z = (*grid, 1, 1)[:3]
        address = ctypes.addressof(buffer)
        run_asm(
            self._entry, 0, x, y, z, self._threads, 1, 1, address, self._resources, self._scratch, "rdna3"
        )  # fmt: skip


_binary = cache(Binary)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **options: Any) -> None:
    """In the place of `launch`: the binary that a launch on the card would run."""
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in list(options) if name in names}
    form = forms.form_of(kernel, given, options | TARGET.options)
    kinds = dict(form.signature)
    if 0 not in grid:
        _binary(form).run(grid, [given[name] for name in names if kinds[name] != "constexpr"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(kernel_names()))
    parser.add_argument("--cases", default="", help="labels of cases that contain this")
    parser.add_argument("--types", default="float32,bfloat16")
    args = parser.parse_args()
    launching._collected = launching.Collected(TARGET)  # what `target_of` answers
    for module in (attention, elementwise, gemm, moe, recurrent, vocabulary):
        module.launch = launch
    wrong = 0
    for name in args.only.split(","):
        for case in check.cases(name):
            for dtype in [getattr(torch, each) for each in args.types.split(",")]:
                if args.cases not in case.label or (name in check.FLOAT32 and dtype != torch.float32):
                    continue
                started = time.perf_counter()
                found = check.disagreement(name, kernel(name), torch.device("cpu"), dtype, case)
                wrong += bool(found)
                print(f"{name:<18} {str(dtype)[6:]:<9} {found or case.label + ': agrees'} "
                      f"({time.perf_counter() - started:.0f} s)", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
