"""Compiles every Triton kernel, in every form that operations ask for, for each GPU, without a GPU.

    python tests/gpu/compile.py [--targets sm90,gfx942] [--quick] [--page docs/reference/devices.md]

The forms are those that the operations launch for the cases that kernels are compared with (`check.cases`), in each
type, and for the matrices of an 8B model and of a mixture of experts with few and many rows; with --quick the latter
alone, which `tests/gpu/test_compiled.py` does for one target. Fails on a kernel that does not compile, that spills
registers or needs more shared memory than there is, or whose matrix instruction depends on the number of rows: they sum
in different orders. Prints a row for each kernel and target; --page writes them as a page, with what `ran.json` says
was run on cards.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llm.kernels.reference.linear import pack
from llm.kernels.triton import check
from llm.kernels.triton.backend import kernel, kernel_names
from llm.kernels.triton.launch import TARGETS, Target, collecting
from llm.kernels.weight import ExpertWeights, Weight

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


# --- Which forms there are. ---

# (N, K) of an 8B model, and of a small one, whose tiles of outputs are few.
SHAPES = ((28672, 4096), (4096, 14336), (1024, 4096))
# What of a GEMM's constants may depend on the number of rows.
_BY_ROWS = {"BM", "BN", "SPLIT", "SEGMENTS", "SEGMENT"}
# Bytes of a thread that may lie in memory: a tile of the largest size may spill a little and still be the fastest.
_SPILLED = 512


def of_shapes() -> Iterator[tuple[torch.Tensor, Weight]]:
    """Activations and weights without memory."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    one = torch.zeros(1, 32, dtype=torch.int8)
    for n, k in SHAPES:
        exact = replace(pack(one.bfloat16()), data=empty(n, k, dtype=torch.bfloat16), n=n, k=k)
        rows = empty(n, 1, dtype=torch.float32)
        eight = replace(pack(one, "int8"), data=empty(n, k, dtype=torch.int8), n=n, k=k).scaled(rows)
        four = replace(pack(one, "int4"), data=empty(n, k // 2, dtype=torch.uint8), n=n, k=k)
        in_groups = four.scaled(empty(n, k // 32, dtype=torch.bfloat16), None, 32)
        levels = four.scaled(rows, None, 32, levels=empty(n, k // 32, dtype=torch.uint8))
        rotated = (replace(weight, activations="int8", rotation=256) for weight in (eight, levels))
        kinds = (exact, eight, in_groups, *rotated, replace(in_groups, rotation=256))
        for weight in kinds:
            for m in (1, 2048):
                yield empty(m, k, dtype=torch.bfloat16), weight


def of_experts() -> Iterator[tuple[Any, ...]]:
    """Arguments of `experts` without memory: 128 experts, 8 of them for each token."""
    one = torch.zeros(1, 32, dtype=torch.int8)

    def weight(kind: str, n: int, k: int) -> Weight:
        scale = torch.empty(n, 1, device="meta")
        data = torch.empty(n, k // 2 if kind == "levels" else k, dtype=torch.int8, device="meta")
        if kind == "bfloat16":
            return replace(pack(one.bfloat16()), data=data.bfloat16(), n=n, k=k)
        if kind == "w8a8":
            return replace(replace(pack(one, "int8"), data=data, n=n, k=k).scaled(scale), activations="int8")
        levels = torch.empty(n, k // 32, dtype=torch.uint8, device="meta")
        four = replace(pack(one, "int4"), data=data.view(torch.uint8), n=n, k=k)
        return replace(four.scaled(scale, None, 32, levels=levels), activations="int8")

    for kind in ("bfloat16", "w8a8", "levels"):
        experts = ExpertWeights((weight(kind, 1536, 2048),) * 128, (weight(kind, 2048, 768),) * 128)
        for m in (1, 2048):
            ids = torch.empty(m, 8, dtype=torch.int64, device="meta")
            yield torch.empty(m, 2048, dtype=torch.bfloat16, device="meta"), ids, ids.float(), experts


def forms(target: str, quick: bool) -> dict[Form, str]:
    """Every form that is launched -> the operation that launches it first."""
    found: dict[Form, str] = {}

    def collect(name: str, *args: Any, **kwargs: Any) -> None:
        with collecting(target) as collected:
            kernel(name)(*args, **kwargs)
        for launched in collected.launches:
            found.setdefault(form_of(*launched), name)

    for x, weight in of_shapes():
        collect("linear", x, weight)
    for args in of_experts():
        collect("experts", *args)
    for name in [] if quick else kernel_names():
        for case in check.cases(name):
            for dtype in [torch.float32] if name in check.FLOAT32 else check.ALLOWED:
                args = [check._as_type(item, dtype, at in case.changed) for at, item in enumerate(case.args)]
                collect(name, *args, **case.kwargs)
    return found


def faults(compiled: Compiled, target: Target) -> list[str]:
    said = []
    if compiled.shared > target.shared:
        said.append(f"{compiled.shared} bytes of shared memory, {target.shared} are there")
    if compiled.registers > target.registers:
        said.append(f"{compiled.registers} registers, {target.registers} are there")
    if compiled.spilled > _SPILLED:
        said.append(f"{compiled.spilled} bytes of registers spilled")
    return said


class Row(NamedTuple):
    """What a kernel needs on a target, over all of its forms. `operations`: what launches it."""

    operations: frozenset[str]
    forms: int
    registers: int
    spilled: int
    shared: int


def compile_target(name: str, quick: bool) -> tuple[dict[str, Row], list[str]]:
    """(a row for each kernel, which is also printed; what is wrong with them on this target)."""
    target, wrong = TARGETS[name], []
    operations: dict[str, set[str]] = {}
    rows: dict[str, list[Compiled]] = {}
    products: dict[tuple[Any, ...], set[str]] = {}
    for form, operation in forms(name, quick).items():
        label = f"{name} {form.kernel.fn.__name__} of {operation}"
        try:
            compiled = compile_form(form, target)
        except Exception as error:  # whatever a compiler raises is the finding
            wrong.append(f"{label}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        own = dict(form.constants)
        wrong += [f"{label}: {text} ({own})" for text in faults(compiled, target)]
        rows.setdefault(form.kernel.fn.__name__, []).append(compiled)
        operations.setdefault(form.kernel.fn.__name__, set()).add(operation)
        fixed = tuple((key, value) for key, value in form.constants if key not in _BY_ROWS)
        products.setdefault((label, form.signature, fixed), set()).update(compiled.products)
    wrong += [f"{label}: several matrix instructions, {sorted(each)}"
              for (label, *_), each in products.items() if len(each) > 1]  # fmt: skip
    table = {}
    for kernel_name, each in rows.items():
        registers, shared = max(one.registers for one in each), max(one.shared for one in each)
        spilled = max(one.spilled for one in each)
        table[kernel_name] = Row(frozenset(operations[kernel_name]), len(each), registers, spilled, shared)
        sizes = f"up to {registers} registers, {spilled} bytes spilled, {shared // 1024} KiB of shared memory"
        print(f"{name:<8} {kernel_name:<16} {len(each):>4} forms, {sizes}", flush=True)
    return table, wrong


_PAGE = """# Kernels on devices

Written by `python tests/gpu/compile.py --page`; [GPUs and other devices](../howto/devices.md) says what they are for.
All of them run in Triton's interpreter in the tests, against their definitions in PyTorch. "Compiled" is by Triton
{triton}, with no device, in all forms that the operations ask for: the number of forms, then at most so many registers
and KiB of shared memory, and where they do not suffice the bytes of a thread in memory. "Run" is on a card, by
`python tests/gpu/run.py`.

| kernel | of the operations | {targets} | run on {device}, {date} |
|---|---|{lines}---|
{rows}
"""


def page(tables: dict[str, dict[str, Row]]) -> str:
    ran = json.loads((Path(__file__).parent / "ran.json").read_text())
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    lines = []
    for name in names:
        each = [table.get(name) for table in tables.values()]
        operations = sorted(frozenset().union(*(row.operations for row in each if row)))
        cells = [
            f"{row.forms}: {row.registers}, {row.shared // 1024}" + (f", {row.spilled} spilled" if row.spilled else "")
            if row else "" for row in each
        ]  # fmt: skip
        own = [ran["kernels"].get(operation, "not yet") for operation in operations]
        found = ran["kernels"].get(name) or "; ".join(dict.fromkeys(own))
        lines.append(f"| `{name}` | {', '.join(f'`{one}`' for one in operations)} | {' | '.join(cells)} | {found} |")
    return _PAGE.format(
        triton=triton.__version__, targets=" | ".join(tables), lines="---|" * len(tables), rows="\n".join(lines),
        device=ran["device"], date=ran["date"],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    wrong, tables = [], {}
    for name in args.targets.split(","):
        tables[name], found = compile_target(name, args.quick)
        wrong += found
    if args.page:
        args.page.write_text(page(tables))
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
