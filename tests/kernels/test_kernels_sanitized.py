"""The kernels under AddressSanitizer and UBSan: a driver calls each with buffers of exactly the promised size.

TEST_ALL_ISAS=1 compiles it for every instruction set that is tested: set it when you change a kernel.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_sets
import pytest

from llm.kernels.cpu import build
from llm.kernels.cpu.signatures import KERNELS

PARTS = ("kernels_driver.cpp", "kernels_driver_step.cpp", "kernels_driver_experts.cpp")
DRIVERS = [Path(__file__).parent / name for name in PARTS]
# Checks are calls, not code at every access, and nothing is optimized: it builds in a third of the time and sees more.
FLAGS = (
    *("-O0", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("--param", "asan-instrumentation-with-call-threshold=0"),
)
# The best set is what most users run; plain C++ shows what the intrinsics hide from UBSan.
TARGETS = kernel_sets.TARGETS if os.environ.get("TEST_ALL_ISAS") == "1" else kernel_sets.TARGETS[-1:]


def declarations() -> str:
    """The header of the drivers: every kernel as signatures.py declares it."""
    names = ("Activations", "BlockType", "Kind", "Weight", "WeightForm")
    lines = ['#include "weight.h"', *(f"using llm::{name};" for name in names), 'extern "C" {']
    for kernel in KERNELS.values():
        result, *types = kernel.types
        arguments = (f"{kind} {name}" for kind, name in zip(types, kernel.names, strict=True))
        lines.append(f"{result} {kernel.name}({', '.join(arguments)});")
    return "\n".join([*lines, "}", ""])


def compile_driver(target: str, folder: Path) -> Path | None:
    """The driver's program, or None where this compiler has no sanitizers."""
    compiler = build.find_compiler()
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    (folder / "declarations.h").write_text(declarations())
    base = [compiler, *build.FLAGS, *build.TARGETS[target], *FLAGS, f"-I{build.SOURCE_FOLDER}", f"-I{folder}"]
    if subprocess.run([*base, str(probe), "-o", str(folder / "probe")], capture_output=True, check=False).returncode:
        return None
    sources = [*build.sources(), *DRIVERS]
    objects = [folder / f"{path.stem}.o" for path in sources]

    def compile_one(index: int) -> None:
        subprocess.run([*base, "-c", str(sources[index]), "-o", str(objects[index])], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, range(len(sources))))
    program = folder / "driver"
    subprocess.run([*base, *map(str, objects), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module", params=TARGETS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        program = compile_driver(request.param, tmp_path_factory.mktemp(request.param))
    except build.BuildError:
        pytest.skip("no C++ compiler on this machine")
    if program is None:
        pytest.skip("the C++ compiler of this machine has no sanitizers")
    return program


def test_no_kernel_leaves_its_buffers(driver: Path) -> None:
    done = subprocess.run([str(driver)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    status, calls = done.stdout.split()
    assert status == "ok" and int(calls) > 5000


def test_a_read_beyond_a_buffer_is_seen(driver: Path) -> None:
    done = subprocess.run([str(driver), "planted"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
