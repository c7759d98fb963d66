"""Compiles every Triton kernel, in every form that operations ask for, for each GPU, without a GPU.

    python tests/gpu/compile.py [--quick] [--write]

The forms are those that the operations launch when they are called with tensors of "meta" of the shapes of real models.
Fails on a kernel that does not compile, that needs more registers or shared memory than there is, or whose matrix
instruction depends on the number of rows: they sum in different orders.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llm.kernels.triton.launch import TARGETS, Target

_GPU = {name: GPUTarget(t.api, t.arch if t.api == "cuda" else name, 64 if name.startswith("gfx9") else 32)
        for name, t in TARGETS.items()}  # fmt: skip
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


class Form(NamedTuple):
    """What one compilation depends on; hashable, so that each is compiled once."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass
class Compiled:
    """`registers`: of a thread. `spilled`: bytes of a thread in memory. `products`: its matrix instructions."""

    form: Form
    registers: int
    spilled: int
    shared: int
    products: frozenset[str]


def form_of(kernel: Any, args: dict[str, Any], options: dict[str, Any]) -> Form:
    """As Triton specialises a launch: numbers that are 1, and those and pointers that 16 divides."""
    fixed = {kernel.arg_names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize or ()}
    signature, constants, divisible = [], {}, []
    for index, param in enumerate(kernel.params):
        value = args[param.name]
        if param.is_constexpr or value is None:
            kind, constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            kind = "*" + TYPES[value.dtype]
            divisible.append(index)
        elif isinstance(value, bool):
            kind = "i1"
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if param.name not in fixed and value == 1:
                kind, constants[param.name] = "constexpr", 1
            elif param.name not in fixed and value % 16 == 0:
                divisible.append(index)
        else:
            kind = "fp32"
        signature.append((param.name, kind))
    return Form(kernel, tuple(signature), tuple(constants.items()), tuple(divisible), tuple(sorted(options.items())))


def compile_form(form: Form, target: Target) -> Compiled:
    pointers = {(index,): [["tt.divisibility", 16]] for index in form.divisible}
    source = ASTSource(form.kernel, dict(form.signature), dict(form.constants), pointers)
    built = triton.compile(source, target=_GPU[target.name], options=dict(form.options))
    if target.api == "cuda":
        registers, spilled, text = *_cuda_resources(built), built.asm["ptx"]
        found = re.findall(r"(?:mma\.sync\.aligned|wgmma\.mma_async\.sync\.aligned|tcgen05\.mma)[.\w:]*", text)
        products = frozenset(re.sub(r"(m64)n\d+", r"\1", name) for name in found)
    else:
        text = built.asm["amdgcn"]
        registers = max(int(n) for n in re.findall(r"\.vgpr_count:\s+(\d+)", text))
        spilled = 4 * max(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text))
        products = frozenset(re.findall(r"v_(?:mfma|wmma)_\w+", text))
    return Compiled(form, registers, spilled, built.metadata.shared, products)


def _cuda_resources(built: Any) -> tuple[int, int]:
    """(registers, spilled bytes), as `cuobjdump` reads them from the binary."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
