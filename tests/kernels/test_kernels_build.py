"""Compiling, caching and loading the CPU kernels: once per machine, whatever happens to the build."""

from __future__ import annotations

import multiprocessing
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_sets import needs_compiler, needs_kernels

from llm.base import system
from llm.cli import main
from llm.errors import ValidationError
from llm.kernels import bench
from llm.kernels.backend import OPERATIONS
from llm.kernels.cpu import backend, build, library, signatures
from llm.kernels.reference.backend import REFERENCE
from llm.kernels.select import backend_for
from llm.platforms import select_platform

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
BF16 = {"avx512_vnni", "avx512_bf16"}
AMX = {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        (set(), "plain"),
        ({"avx2"}, "plain"),
        (AVX2, "avx2"),
        (AVX2 | {"avx_vnni"}, "avx2_vnni"),
        (AVX512 | {"avx_vnni"}, "avx512"),
        (AVX512 | {"avx512_vnni"}, "avx512_vnni"),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx512_bf16"),
        (AVX512 | {"avx512_vnni"} | AMX, "amx"),
        (build.flags_in("processor\t: 0\nFeatures\t: fp asimd crc32 asimdhp asimddp\nprocessor\t: 1\n"), "neon"),
        ({"asimd", "asimddp", "i8mm"}, "neon_i8mm"),
        (build.flags_in("processor\t: 0\nFeatures\t: fp asimd crc32\n"), "plain"),
        (AVX512 | BF16 | {"GenuineIntel"}, "avx512_bf16"),
        (AVX512 | BF16 | {"AuthenticAMD", "avx512_fp16"}, "avx512_bf16"),
        (AVX512 | BF16 | {"GenuineIntel", "avx512_fp16"}, "avx512_vnni"),
        (AVX512 | BF16 | AMX | {"GenuineIntel", "avx512_fp16"}, "amx"),
        (build.flags_in(f"vendor_id\t: GenuineIntel\nflags\t\t: avx512_fp16 {' '.join(AVX512 | BF16)}"), "avx512_vnni"),
        (build.flags_in("vmx flags : x\nflags\t\t: fpu avx2 fma f16c\n"), "avx2"),
    ],
)
def test_the_best_instruction_set_is_chosen(flags: set[str], target: str) -> None:
    assert library.choose_target(None, flags)[0] == target


def test_what_a_wheel_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "machine_targets", lambda: list(build.TARGETS))
    monkeypatch.setattr(build, "read_cpu_flags", lambda: AVX512)
    assert build.wheel_targets("") == ["avx512"]
    assert build.wheel_targets("plain,avx2") == ["plain", "avx2"]
    assert build.wheel_targets("all") == list(build.TARGETS)
    monkeypatch.setattr(build, "read_cpu_flags", lambda: AVX2)
    assert build.wheel_targets("") == ["avx2"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_where_linux_tells_of_no_such_processor_pytorch_does(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, on Windows, and in an emulator, which shows the processor outside."""
    outside = "Features\t: fp asimd asimddp\n" if machine == "x86_64" else "flags\t\t: fpu sse2 avx2\n"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(build.Path, "read_text", lambda path: outside)
    monkeypatch.setattr(build, "flags_of_torch", lambda: {"told"})
    assert build.read_cpu_flags() == {"told"}


def test_a_wheel_that_is_built_without_pytorch_has_kernels_if_the_processor_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert build.wheel_targets("") == build.fast_targets()[-1:]
    monkeypatch.setattr(build, "flags_in", lambda cpuinfo: set())
    assert build.wheel_targets("") == []


@pytest.mark.parametrize(
    ("machine", "targets"),
    [
        ("x86_64", {"plain", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"}),
        ("aarch64", {"plain", "neon", "neon_i8mm"}),
        ("riscv64", {"plain"}),
    ],
)
def test_targets_belong_to_an_architecture(machine: str, targets: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert {*build.machine_targets()} == targets


def test_an_instruction_set_can_be_forced() -> None:
    flags = AVX512 | {"avx512_vnni"}
    assert library.choose_target("plain", flags)[0] == "plain"
    assert library.choose_target("avx2", flags | {"avx_vnni"})[0] == "avx2"
    assert library.choose_target("avx2_vnni", flags | {"avx_vnni"})[0] == "avx2_vnni"
    assert library.choose_target("avx512", flags)[0] == "avx512_vnni"
    assert library.choose_target("avx512_vnni", flags | AMX)[0] == "avx512_vnni"
    assert library.choose_target("avx512", AVX512)[0] == "avx512"
    assert library.choose_target("avx512", flags | AMX)[0] == "avx512_bf16"
    slow = AVX512 | BF16 | {"GenuineIntel", "avx512_fp16"}
    assert library.choose_target("avx512", slow)[0] == "avx512_vnni"
    assert library.choose_target("avx512_bf16", slow)[0] == "avx512_bf16"
    assert library.choose_target("amx", flags | AMX)[0] == "amx"
    assert library.choose_target("neon", {"asimd", "asimddp"})[0] == "neon"
    assert library.choose_target("neon", {"asimd", "asimddp", "i8mm"})[0] == "neon_i8mm"
    with pytest.raises(ValidationError, match=r"LLM_CPU_ISA='avx512' needs .* runs plain, avx2\."):
        library.choose_target("avx512", AVX2)


def test_without_the_registers_of_amx_the_next_best_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "request_tiles", lambda: False)
    assert not [flag for flag in build.read_cpu_flags() if flag.startswith("amx")]
    library.load_library.cache_clear()
    with pytest.raises(build.BuildError, match="LLM_CPU_ISA=avx512"):
        library.load_library("amx")


@pytest.mark.parametrize(
    ("unknown", "flags", "next_best"),
    [
        (("avx512_vnni", "avx512"), AVX512 | {"avx512_vnni"}, "avx2"),  # the only one of the wheel
        (("amx",), AVX512 | {"avx512_vnni"} | AMX, "avx512_vnni"),
        (("avx512_bf16",), AVX512 | BF16, "avx512_vnni"),
        (("avx2_vnni",), AVX2 | {"avx_vnni"}, "avx2"),
        (("neon_i8mm",), {"asimd", "asimddp", "i8mm"}, "neon"),
    ],
)
def test_a_compiler_that_does_not_know_the_best_gives_the_next_best(
    monkeypatch: pytest.MonkeyPatch, unknown: tuple[str, ...], flags: set[str], next_best: str
) -> None:
    def load(target: str) -> SimpleNamespace:
        if target in unknown:
            raise build.BuildError(f"unrecognized option '-m{target}'")
        return SimpleNamespace(target=target, multiplies_bf16=False)

    monkeypatch.setattr(build, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr(backend, "load_library", load)
    monkeypatch.setattr(build, "packaged_library", lambda target: Path(target) if target == "avx2" else None)
    kernels = backend._cpu_backend.__wrapped__(None)
    assert kernels.variant == next_best
    assert kernels.reason == f"{unknown[0]} is not available: unrecognized option '-m{unknown[0]}'"


def test_a_wrong_name_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_CPU_ISA", "sse")
    with pytest.raises(ValidationError, match=r"LLM_CPU_ISA='sse' is not known; use one of plain, avx2, .*, none\."):
        library.requested_isa()


@pytest.mark.parametrize("target", build.TARGETS)
def test_the_environment_may_name_every_target_in_any_case(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`llm.config`, `explain` and the doctor show targets by these names."""
    for name in (target, target.upper()):
        monkeypatch.setenv("LLM_CPU_ISA", name)
        assert library.requested_isa() == target


def test_none_means_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_CPU_ISA", "none")
    kernels = backend_for(select_platform("cpu")[0])
    assert not kernels.computes("rms_norm")
    invariant, reason = kernels.invariant
    assert not invariant and "LLM_CPU_ISA=none" in reason


def compile_in(folder: str) -> str:
    return str(build.ensure_library("plain", folder=Path(folder), announce=lambda line: print(line, flush=True)))


@pytest.fixture
def quick_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder with only the threads in it: what is tested here is the build."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("threads.cpp", "parallel.h", "system.h", "replay.h", "integers.h"):
        (folder / name).write_bytes((build.SOURCE_FOLDER / name).read_bytes())
    monkeypatch.setattr(build, "SOURCE_FOLDER", folder)
    monkeypatch.setattr(library, "KERNELS", {})
    monkeypatch.setattr(library, "mismatches", lambda handle: [])
    return folder


@needs_compiler
def test_it_is_compiled_once_and_again_when_a_source_changes(quick_sources: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = build.ensure_library("plain", folder=tmp_path, announce=lines.append)
    assert build.ensure_library("plain", folder=tmp_path, announce=lines.append) == first
    assert len(lines) == 1 and "once" in lines[0]
    (quick_sources / "parallel.h").write_text((quick_sources / "parallel.h").read_text() + "\n// changed\n")
    assert build.ensure_library("plain", folder=tmp_path, announce=lines.append) != first
    assert len(lines) == 2


@needs_compiler
def test_two_processes_build_once(quick_sources: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map(compile_in, [str(tmp_path)] * 2)
    assert first == second
    assert [path.name for path in tmp_path.glob("*.so")] == [Path(first).name]
    assert not list(tmp_path.glob("scratch-*"))


@needs_compiler
def test_what_a_killed_build_left_is_removed_and_never_loaded(quick_sources: Path, tmp_path: Path) -> None:
    """And what another process is building, of other sources, is left alone."""
    own = build.cached_library("plain", build.find_compiler(), tmp_path)
    stale, others = tmp_path / f"scratch-{own.stem}-killed", tmp_path / "scratch-plain-0123456789abcdef-at-work"
    for folder in (stale, others):
        folder.mkdir()
        (folder / "library.so").write_text("half a library")
    path = build.ensure_library("plain", folder=tmp_path, announce=lambda line: None)
    assert path == own and not stale.exists() and others.exists()
    assert library.Library("plain", path).target == "plain"


def test_a_checkout_uses_the_kernels_of_a_package_installed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install .` in a checkout, then `python -m llm` there, which finds the folder before the package."""
    monkeypatch.setattr(build, "PACKAGED_FOLDER", tmp_path / "checkout" / "compiled")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    folder = tmp_path / "site-packages" / "llm" / "kernels" / "cpu" / "compiled"
    folder.mkdir(parents=True)
    (folder / "plain-of-other-sources.so").write_text("another")
    monkeypatch.setattr(build, "source_key", lambda: "key-of-this-test")
    assert build.packaged_library("plain") is None
    (folder / "plain-key-of-this-test.so").write_text("half of")
    assert build.packaged_library("plain") is None
    build.seal(folder / "plain-key-of-this-test.so")
    found = folder / "plain-key-of-this-test.so"
    assert build.packaged_library("plain") == found
    for path, mode in ((folder, 0o777), (found, 0o775), (folder.parents[2], 0o757)):
        before = path.stat().st_mode
        path.chmod(mode)  # others could put a library there
        assert build.packaged_library("plain") is None
        path.chmod(before)
    assert build.packaged_library("plain") == found
    for entry in ("", ".", "site-packages", str(tmp_path / "work")):
        monkeypatch.setattr("sys.path", [entry])
        monkeypatch.chdir(tmp_path)
        place = Path(entry or ".") / "llm" / "kernels" / "cpu" / "compiled"
        place.mkdir(parents=True, exist_ok=True)
        (place / found.name).write_bytes(found.read_bytes())
        assert build.packaged_library("plain") is None


def test_a_compiler_that_cannot_be_found_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None if name == "no-such-compiler" else f"/bin/{name}")
    assert build.find_compiler() == build.find_compiler()
    assert caplog.text.count("CXX='no-such-compiler' is no program") == 1


def truncate(path: Path) -> None:
    """To whole pages, as a crash leaves it: mapping what is missing is SIGBUS."""
    os.truncate(path, 8192)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def let_others_write(path: Path) -> None:
    path.chmod(0o777)


@needs_compiler
@pytest.mark.parametrize("spoil", [truncate, empty, damage, let_others_write])
def test_a_spoilt_cached_file_is_built_again(
    spoil: Callable[[Path], None], quick_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    path = build.ensure_library("plain", announce=lines.append)
    good = path.read_bytes()
    assert build.ensure_library("plain", announce=lines.append) == path and len(lines) == 1
    spoil(path)
    assert library.load_library.__wrapped__("plain").path == path
    assert build.is_usable(path) and len(path.read_bytes()) == len(good)


@needs_compiler
def test_a_library_that_lacks_a_function_is_built_again(
    quick_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, by its digest: of other sources, put there under this name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = signatures.parse("void quick(void* x)")["quick"]
    monkeypatch.setattr(library, "KERNELS", {"quick": kernel})
    path = build.ensure_library("plain", announce=lambda line: None)
    content = path.read_bytes()
    (quick_sources / "quick.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) long quick_replay(const char*) { return 0; }'
    )
    path = build.ensure_library("plain", announce=lambda line: None)
    path.write_bytes(content)
    assert build.is_usable(path)
    assert kernel in library.load_library.__wrapped__("plain").entries


@needs_compiler
def test_a_cache_that_others_write_to_is_not_used(
    quick_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(build.BuildError, match="others may write"):
        build.ensure_library("plain", folder=tmp_path)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    if os.geteuid():
        with pytest.raises(build.BuildError, match="belongs to another user"):
            build.ensure_library("plain", folder=tmp_path)
    assert list(tmp_path.glob("*.so")) == []


def test_the_cache_is_never_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    for home in ("", "there"):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setattr(system, "home_of_user", lambda: "")
        with pytest.raises(build.BuildError, match="XDG_CACHE_HOME"):
            build.cache_folder()
    monkeypatch.setenv("HOME", "/home/me")
    assert build.cache_folder() == Path("/home/me/.cache/offline-llm/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert build.cache_folder() == Path("/caches/offline-llm/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(system, "home_of_user", lambda: "/home/known")
    assert build.cache_folder() == Path("/home/known/.cache/offline-llm/kernels")


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_failing_compiler_is_reported_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo no such flag; exit 1"))
    with pytest.raises(build.BuildError, match="no such flag"):
        build.ensure_library("plain", folder=tmp_path, announce=lambda line: None)
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob("scratch-*"))


# Writes what it was asked for once the file `go` is there; `calls` has a line for each time it was started.
SLOW = 'echo "$$" >> {0}/calls; while [ ! -e {0}/go ]; do sleep 0.02; done; for last; do :; done; echo x > "$last"'


def test_compilers_that_a_killed_process_left_are_waited_for(
    quick_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two others that start then build once, and say what they wait for; how long they wait does not matter."""
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, SLOW.format(tmp_path)))
    folder, calls, fork = tmp_path / "cache", tmp_path / "calls", multiprocessing.get_context("fork")
    folder.mkdir()
    killed, *others = (fork.Process(target=compile_in, args=(str(folder),)) for _ in range(3))
    killed.start()
    wait_until(calls.exists)
    killed.kill()
    killed.join()
    for process in others:
        process.start()
    waits = "Waiting for another process"
    seen: list[str] = []
    wait_until(lambda: printed(capfd, seen).count(waits) == 2)
    assert len(calls.read_text().split()) == 1  # of the killed one: nobody compiles beside it
    (tmp_path / "go").touch()
    for process in others:
        process.join()
        assert process.exitcode == 0
    assert len(calls.read_text().split()) == 3  # one file, and linking it
    assert len(list(folder.glob("*.so"))) == 1 and not list(folder.glob("scratch-*"))


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def printed(capfd: pytest.CaptureFixture[str], before: list[str]) -> str:
    """All of what was printed; `before` collects what earlier calls read."""
    before.append(capfd.readouterr().out)
    return "".join(before)


@pytest.mark.parametrize(
    ("script", "fails"), [("while :; do :; done", True), ('sleep 2; for last; do :; done; echo x > "$last"', False)]
)
def test_cpu_time_is_counted_and_not_the_time_that_passes(
    script: str, fails: bool, quick_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, option, _, name = build._LIMITED
    assert build._LIMITED[2].startswith(f"ulimit -S -t {build._CPU_SECONDS}")
    monkeypatch.setattr(build, "_LIMITED", (shell, option, 'ulimit -S -t 1; exec "$@"', name))
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    folder = tmp_path / "cache"
    if not fails:
        assert build.is_usable(build.ensure_library("plain", folder=folder, announce=lambda line: None))
        return
    with pytest.raises(build.BuildError, match="seconds of CPU time"):
        build.ensure_library("plain", folder=folder, announce=lambda line: None)


def test_why_there_are_no_kernels_is_said_in_the_warning_and_in_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo x.cpp: In f:; echo 'x.cpp:3: error: no disk'; exit 1"))
    monkeypatch.setattr(build, "packaged_library", lambda target: None)
    load = library.load_library.__wrapped__
    monkeypatch.setattr(backend, "load_library", load)
    with pytest.warns(
        UserWarning, match=r"invariant is False.*\n?.*the C\+\+ compiler failed: x.cpp:3: error: no disk"
    ):
        found = backend._cpu_backend.__wrapped__("plain")
    assert found.invariant[0] is False and found.invariant[1].endswith("compiler failed: x.cpp:3: error: no disk")
    assert "\n" not in found.invariant[1]


def test_without_a_compiler_one_warning_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import torch, warnings\n"
        "from llm.kernels.select import backend_for\n"
        "from llm.platforms import select_platform\n"
        "for _ in range(2): kernels = backend_for(select_platform()[0])\n"
        "print(kernels.name, kernels.invariant)\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("LLM_CPU_ISA", None)
    if any(build.packaged_library(target) for target in build.TARGETS):
        pytest.skip("the installed package carries compiled kernels")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("apt-get install g++") == 1
    assert done.stdout.startswith("reference (False,")


@needs_compiler
@needs_kernels
def test_kernels_get_the_arguments_they_declare() -> None:
    """Pointers, integers of 64 bits of either sign, and floats rounded once."""
    kernels: Any = backend_for(select_platform("cpu")[0])
    found = kernels.library
    scale, shift = signatures.KERNELS["llm_scale"], signatures.KERNELS["llm_shift"]
    x, out = torch.tensor([1.0, 3.0, -7.0]), torch.empty(3)
    found.call(scale, x.data_ptr(), -0.1, out.data_ptr(), 3, 1)
    assert torch.equal(out, x * torch.tensor(-0.1))
    ids, shifted = torch.tensor([5, -(2**62)]), torch.empty(2, dtype=torch.int64)
    assert found.call(shift, ids.data_ptr(), -(2**40) - 3, shifted.data_ptr(), 2) == 0
    assert torch.equal(shifted, ids - 2**40 - 3)


def test_every_operation_has_its_implementations() -> None:
    kernels = backend_for(select_platform("cpu")[0])
    for name in OPERATIONS:
        assert callable(kernels.op(name)) and callable(REFERENCE.op(name))
        assert REFERENCE.source(name) == "PyTorch"


@needs_compiler
@needs_kernels
def test_the_bench_measures_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHAPES", ((32, 48),))
    monkeypatch.setattr(bench, "ROWS", (1, 9))
    monkeypatch.setattr(bench, "EXPERT", (32, 128))
    monkeypatch.setattr(bench, "_COLD_BYTES", 1 << 14)
    monkeypatch.setattr(bench, "_CALLS", 3)
    monkeypatch.setattr(bench, "_COLD_STATES", 1 << 14)
    monkeypatch.setattr(bench, "_READ_BYTES", 1 << 18)
    lines = list(bench.run(backend_for(select_platform("cpu")[0]), 0.0))
    integers = ["w8a8", "w4a8", "w4a8", "w4a8", "w8a16", "w4a16", "w4a16"]
    assert [line.split()[0] for line in lines[3:13]] == ["float32", "bfloat16", "float16", *integers]
    assert sum(line.startswith("torch") for line in lines) == 3
    assert sum(line.startswith("experts w4a8") for line in lines) == len(bench.EXPERT_ROWS)
    states = [line.split() for line in lines if line.startswith(tuple(case.name for case in bench.CASES))]
    # Rates are rounded, to 0 where other programs take the processor; times only grow.
    assert len(states) == 8 and all(float(time) > 0 for line in states for time in line[-5:-2])
    calls = [line.split() for line in lines[lines.index(next(line for line in lines if "replayed" in line)) + 1 :]]
    assert {"rms_norm", "linear_float32", "linear_w8a8", "experts", "paged_attention"} <= {name for name, *_ in calls}
    assert all(float(called) > 0 and float(replayed) > 0 for _, called, replayed in calls)


@pytest.mark.parametrize(("isa", "target"), [("plain", "plain"), ("none", None), (None, None)])
def test_the_command_builds_what_will_be_loaded(
    isa: str | None, target: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "ensure_library", lambda name, rebuild: Path(name))
    monkeypatch.delenv("LLM_CPU_ISA", raising=False)
    if isa is not None:
        monkeypatch.setenv("LLM_CPU_ISA", isa)
    assert main(["kernels", "build"]) == 0
    assert capsys.readouterr().out.startswith(f"{target or build.fast_targets()[-1]}: ")


def test_the_command_does_not_ask_the_environment_for_a_target_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "ensure_library", lambda name, rebuild: Path(name))
    monkeypatch.setenv("LLM_CPU_ISA", "sse")
    assert main(["kernels", "build", "--target", "plain"]) == 0 and capsys.readouterr().out.startswith("plain: ")
    assert main(["kernels", "build"]) == 1 and "LLM_CPU_ISA='sse'" in capsys.readouterr().err
