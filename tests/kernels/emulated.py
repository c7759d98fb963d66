"""The kernel tests on instruction sets that this processor lacks: AVX-512, VNNI, BF16, AVX-VNNI, AMX and NEON.

    python tests/kernels/emulated.py                          # every target that is not the processor's own
    python tests/kernels/emulated.py --targets amx tests/kernels/test_kernels_cpu.py -k float

The kernels' own sources are compiled with emulated.h in front, which replaces each intrinsic by the operation that
Intel's manual gives for it; the statements in assembly are replaced by the same operations. So these are the kernels
that users run, without the registers and the speed: layout, loops, edges, and every bit of the results.

The libraries for aarch64 are compiled for it and run in another process under qemu-user (remote.py).

The emulated libraries are kept in a folder of the user's cache; a pytest plugin puts them in the place of the compiled
ones. AVX2 and FMA are the processor's own. Too slow for CI: some minutes for each target.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import remote

from llm.kernels.cpu import build, library

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).resolve().parent
HEADER = HERE / "emulated.h"
BASE = ("-mavx2", "-mfma", "-mf16c", "-Wno-psabi", "-include", str(HEADER), "-O1")
# Target -> what the header makes the kernels believe they have.
EMULATED: dict[str, tuple[str, ...]] = {
    "avx2_vnni": ("AVX_VNNI",),
    "avx512": ("AVX512",),
    "avx512_vnni": ("AVX512", "VNNI"),
    "avx512_bf16": ("AVX512", "VNNI", "BF16"),
    "amx": ("AVX512", "VNNI", "BF16", "AMX"),
    "neon": (),
    "neon_i8mm": (),
}
REMOTE = ("neon", "neon_i8mm")
PARTS = (
    *("cpu", "rotation", "codes", "attention", "quantized_cache", "latent", "conv", "scan", "gated_delta", "drafts"),
    *("experts", "routing", "lora", "fused", "vocabulary"),
)
TESTS = tuple(f"tests/kernels/test_kernels_{name}.py" for name in PARTS)
compile_natively = build.compile_library
CHOSEN = "EMULATED_TARGETS"  # the environment variable that tells the plugin

# (file, its assembly, the same in C++); each must be found once.
ASSEMBLY: tuple[tuple[str, str, str], ...] = (
    (
        "bytes.h",
        'asm volatile("vpbroadcastd %1, %0" : "=v"(out) : "m"(*static_cast<Four>(four)));',
        "out = emulated::broadcast_four_bytes<Bytes>(static_cast<Four>(four));",
    ),
    (
        "bytes.h",
        'asm volatile("vpdpbusd %2, %1, %0" : "+v"(out) : "v"(unsigned_bytes), "v"(signed_bytes));',
        "out = emulated::dpbusd(out, unsigned_bytes, signed_bytes);",
    ),
    (
        "bytes.h",
        'asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(out) : "x"(unsigned_bytes), "x"(signed_bytes));',
        "out = emulated::dpbusd(out, unsigned_bytes, signed_bytes);",
    ),
    (
        "bytes.h",
        'asm volatile("vpdpwssd %2, %1, %0" : "+v"(out) : "v"(a), "v"(b));',
        "out = emulated::dpwssd(out, a, b);",
    ),
    (
        "bytes.h",
        'asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(out) : "x"(a), "x"(b));',
        "out = emulated::dpwssd(out, a, b);",
    ),
    (
        "attention_int8.h",
        'asm volatile("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(out) : "v"(codes), "m"(*pair));',
        "out = emulated::dpwssd(out, codes, *pair);",
    ),
    ("gemm_int8.cpp", 'asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x));', "sum = emulated::add_doubles(sum, x);"),
    (
        "gemm_int4.cpp",
        'asm volatile("vpmaddubsw %2, %1, %0" : "=v"(sum) : "v"(w), "v"(a));',
        "sum = emulated::maddubs(w, a);",
    ),
    (
        "gemm_int4.cpp",
        r'asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(w), "v"(a));',
        "product = emulated::maddubs(w, a), sum = emulated::add_words(sum, product);",
    ),
    (
        "gemm_tiles.h",
        'asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")',
        "emulated::tile_load(tile, from, stride)",
    ),
    (
        "gemm_tiles.h",
        'asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")',
        "emulated::tile_store(tile, to, stride)",
    ),
    ("gemm_tiles.h", 'asm volatile("tilezero %%tmm" #tile::: "memory")', "emulated::tile_zero(tile)"),
    (
        "gemm_tiles.h",
        'asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum::: "memory")',
        "emulated::tile_dot_bf16(sum, a, b)",
    ),
    (
        "gemm_tiles.h",
        'asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum::: "memory")',
        "emulated::tile_dot_int8(sum, a, b)",
    ),
    ("gemm_tiles.h", 'asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");', "emulated::configure(&shapes);"),
    ("gemm_tiles.h", 'asm volatile("tilerelease" ::: "memory");', "emulated::release();"),
)
# Statements that only keep a value in a register.
BARRIER = re.compile(r'asm\("" : "\+v"\([^;]*\)\);')


def emulated_sources(folder: Path) -> None:
    """Writes the kernels' sources with their assembly replaced; raises if one is not where it was."""
    for path in sorted((*build.SOURCE_FOLDER.glob("*.cpp"), *build.SOURCE_FOLDER.glob("*.h"))):
        text = path.read_text()
        for name, assembly, replacement in ASSEMBLY:
            if name == path.name:
                if text.count(assembly) != 1:
                    raise SystemExit(
                        f"{path} has {assembly!r} {text.count(assembly)} times; emulated.py expects it once"
                    )
                text = text.replace(assembly, replacement)
        (folder / path.name).write_text(BARRIER.sub("", text))


def compile_emulated(output: Path, target: str, compiler: str, extra_flags: tuple[str, ...] = ()) -> None:
    """`build.compile_library` of the emulated sources."""
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        emulated_sources(Path(scratch))
        before = build.SOURCE_FOLDER, build.TARGETS[target]
        build.SOURCE_FOLDER = Path(scratch)
        build.TARGETS[target] = (*BASE, *(f"-DEMULATE_{name}" for name in EMULATED[target]))
        try:
            compile_natively(output, target, compiler, extra_flags)
        finally:
            build.SOURCE_FOLDER, build.TARGETS[target] = before


def emulated_library(target: str) -> Path:
    """The emulated library of `target`, compiled if the sources changed. Not in the folder of the compiled ones."""
    parts = [path.read_bytes() for path in (HEADER, Path(__file__), remote.DRIVER)]
    digest = hashlib.sha256(b"".join([*parts, build.source_key().encode()]))
    path = build.cache_folder().parent / "emulated" / f"{target}-{digest.hexdigest()[:16]}.so"
    if not build.is_usable(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        print(f"Compiling the emulated kernels ({target}) ...", file=sys.stderr, flush=True)
        if target in REMOTE:
            remote.compile_remote(path, target)
        else:
            compile_emulated(path, target, build.find_compiler())
    return path


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: the processor has the chosen targets, and their libraries are the emulated ones."""
    chosen = set(os.environ[CHOSEN].split(","))
    ensure, targets_of, load = build.ensure_library, build.supported_targets, library.Library

    def supported(cpu_flags: set[str] | None = None) -> list[str]:
        if cpu_flags is not None:
            return targets_of(cpu_flags)
        return [target for target in build.TARGETS if target in {"plain", "avx2", *chosen}]

    def compile_one(output: Path, target: str, *rest: Any, **held: Any) -> None:
        if target in chosen:
            compile_emulated(output, target, *rest)
        else:
            compile_natively(output, target, *rest, **held)

    def opened(target: str, path: Path) -> library.Library:
        return remote.RemoteLibrary(target, path) if target in REMOTE else load(target, path)

    build.supported_targets = supported
    build.compile_library = compile_one
    build.ensure_library = lambda target, **options: (
        emulated_library(target) if target in chosen else ensure(target, **options)
    )
    build.request_tiles = lambda: True
    library.Library = opened  # type: ignore[misc, assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A recorded step is replayed inside this process, which a library for another processor never enters."""
    if not set(os.environ[CHOSEN].split(",")).isdisjoint(REMOTE):
        recorded = [item for item in items if "recorded" in item.name]
        config.hook.pytest_deselected(items=recorded)
        items[:] = [item for item in items if item not in recorded]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lacking = [target for target in EMULATED if target not in build.supported_targets()]
    if remote.missing():
        lacking = [target for target in lacking if target not in REMOTE]
    parser.add_argument("--targets", default=",".join(lacking), help="with commas between; by default: %(default)s")
    options, rest = parser.parse_known_args(arguments)
    targets = [target for target in options.targets.split(",") if target]
    unknown = [target for target in targets if target not in EMULATED]
    if unknown or not targets:
        parser.error(f"{', '.join(unknown) or 'no target'}: not one of {', '.join(EMULATED)}")
    if remote.missing() and not set(REMOTE).isdisjoint(targets):
        parser.error(
            f"{' and '.join(REMOTE)} need {remote.missing()}: apt-get install g++-aarch64-linux-gnu qemu-user-static"
        )
    for target in targets:
        emulated_library(target)
    tests = rest if any(Path(argument.split("::")[0]).exists() for argument in rest) else [*TESTS, *rest]
    environment = {**os.environ, CHOSEN: ",".join(targets), "TEST_ALL_ISAS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "emulated", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
