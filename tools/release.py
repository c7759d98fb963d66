"""A release of the last commit: the source distribution, a wheel for each platform, checksums. Same commit, same bytes.

    python -m pip install '.[release]'
    python tools/release.py dist                                   # all of it
    python tools/release.py dist --only any --only macosx_11_0_arm64
    python tools/release.py dist --again                           # compiles anew: the bytes must be those in dist

One compiler, Zig's, makes the kernels of every platform on this machine. The kernels have a C interface and use no C++
runtime, so a wheel serves every Python. Each wheel carries all instruction sets of its platform; `LLM()` chooses at the
start. What was compiled is kept in the user's cache under a hash of sources, compiler and flags.

Checked before anything is written to the folder: the sealed libraries, the versions of glibc's symbols (auditwheel),
the sizes, the metadata (twine), and that the wheel of this machine answers the README's first command with no compiler.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FIRST_COMMAND = ("-m", "llm", "generate", "In the beginning")
MOST_BYTES = 30 << 20
COMPILED = "llm/kernels/cpu/compiled"
_X86 = ("plain", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")
_ARM = ("plain", "neon", "neon_i8mm")


@dataclass(frozen=True)
class Target:
    """A platform: its tag in a wheel's name, Zig's name for it, and the instruction sets that its wheel carries."""

    tag: str
    triple: str
    sets: tuple[str, ...]
    libraries: tuple[str, ...] = ()


# AMX has to be asked of the system, which `build.request_tiles` does on Linux alone.
TARGETS = (
    Target("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", (*_X86, "amx")),
    Target("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", _ARM),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", _ARM),
    Target("win_amd64", "x86_64-windows-gnu", _X86, ("-lapi-ms-win-core-synch-l1-2-0",)),
)
ANY = "any"


class ReleaseError(Exception):
    """What is wrong with the release."""


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """The command's output; raises `ReleaseError` with its end where it fails."""
    words = [str(word) for word in command]
    both = subprocess.STDOUT
    done = subprocess.run(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=both, text=True, env={**os.environ, **environment}, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(words[:6])} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def check_out(tree: Path) -> str:
    """The last commit's files in `tree`; returns its time in seconds. What is not committed is in no release."""
    tree.mkdir()
    packed = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree)
    return run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()


def load_build(tree: Path) -> ModuleType:
    """kernels/cpu/build.py of the tree, as setup.py loads it."""
    sys.path.insert(0, str(tree))
    from llm.kernels.cpu import build

    if not str(build.__file__).startswith(str(tree)):
        raise ReleaseError(f"another llm was imported: {build.__file__}")
    return build


def zig() -> tuple[str, str]:
    """The compiler's path and version."""
    version = importlib.metadata.version("ziglang")
    (path,) = [file for file in importlib.metadata.files("ziglang") or [] if file.name in ("zig", "zig.exe")]
    return str(path.locate()), version


def flags_of(build: ModuleType, target: Target, name: str) -> list[str]:
    """gcc's flags in Zig's words: it takes an architecture's extensions from -mcpu alone."""
    march = "-march=armv8.2-a"
    flags = [flag for flag in build.FLAGS if flag != "-fPIC" or "windows" not in target.triple]
    for flag in build.TARGETS[name]:
        if not flag.startswith("-fno-schedule"):
            flags.append(flag.replace(march, "-mcpu=generic+v8_2a") if flag.startswith(march) else flag)
    return [*flags, "-g0", "-w", "-target", target.triple]


def compile_library(build: ModuleType, output: Path, target: Target, flags: Sequence[str], zig_cache: Path) -> None:
    """The kernels of one instruction set for one platform, sealed as `build` seals them."""
    compiler, _ = zig()
    kept = {"ZIG_GLOBAL_CACHE_DIR": str(zig_cache)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        objects = [folder / f"{path.stem}.o" for path in build.sources()]

        def compile_source(source: Path, out: Path) -> None:
            # From its own folder: no path of this machine gets into the object.
            run(compiler, "c++", *flags, "-c", source.name, "-o", out, cwd=source.parent, **kept)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_source, build.sources(), objects))
        names = [path.name for path in objects]
        link = (*names, *target.libraries, "-o", output.name)
        run(compiler, "c++", "-target", target.triple, "-shared", "-s", "-nostdlib++", *link, cwd=folder, **kept)
        build.seal(folder / output.name)
        shutil.move(folder / output.name, output)


def libraries_of(build: ModuleType, target: Target, cache: Path | None) -> dict[str, bytes]:
    """Name in the wheel -> the library, of every instruction set. `cache`: a folder of compiled ones, or None."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in target.sets:
            file, flags = build.packaged_name(name), flags_of(build, target, name)
            key = hashlib.sha256(repr((zig()[1], flags)).encode()).hexdigest()
            path = Path(scratch if cache is None else cache, f"{target.tag}-{key[:16]}-{file}")
            if not build.is_whole(path):
                print(f"  compiling {name} for {target.tag}", flush=True)
                # Zig keeps objects as well; with the user's, a second build would take the first one's.
                compile_library(build, path, target, flags, Path(scratch, "zig"))
            found[f"{COMPILED}/{file}"] = path.read_bytes()
    return found


def bill_of_materials(version: str, requirements: Sequence[str], libraries: dict[str, bytes], time: str) -> bytes:
    """CycloneDX: what the wheel carries, what made it, and what it asks of an installer."""
    stamp = run("date", "-u", "-d", f"@{time}", "+%Y-%m-%dT%H:%M:%SZ").strip()
    own = {
        "type": "library",
        "bom-ref": "offline-llm",
        "name": "offline-llm",
        "version": version,
        "purl": f"pkg:pypi/offline-llm@{version}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    compiler = {"type": "application", "name": "ziglang", "version": zig()[1], "purl": f"pkg:pypi/ziglang@{zig()[1]}"}
    model = {
        "type": "machine-learning-model",
        "bom-ref": "embedded-model",
        "name": "llm/assets/tiny",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "description": "Trained for this project on the King James Bible, which is in the public domain.",
    }
    files = [
        {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}]}
        for name, data in sorted(libraries.items())
    ]
    runtime = {
        "type": "library",
        "bom-ref": "compiler-rt",
        "name": "compiler-rt",
        "description": "Routines of Zig's compiler that a library may carry.",
        "licenses": [{"license": {"id": "MIT"}}],
    }
    asked = [{"type": "library", "bom-ref": text, "name": text, "scope": "required"} for text in requirements]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": stamp, "component": own, "tools": {"components": [compiler] if libraries else []}},
        "components": [model, *([runtime] if libraries else []), *files, *asked],
        "dependencies": [{"ref": "offline-llm", "dependsOn": list(requirements)}],
    }
    return json.dumps(bill, indent=1).encode() + b"\n"


def write_wheel(pure: Path, folder: Path, tag: str, libraries: dict[str, bytes], time: str) -> Path:
    """The wheel `pure` with the libraries, for the platform `tag`: sorted, with one time, so that bytes repeat."""
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = [name for name in files if name.endswith(".dist-info/RECORD")]
    info = record.rpartition("/")[0]
    version = info.removesuffix(".dist-info").rpartition("-")[2]
    del files[record]
    asked = [
        line.removeprefix("Requires-Dist: ")
        for line in files[f"{info}/METADATA"].decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    files |= libraries
    files[f"{info}/sboms/offline-llm.cdx.json"] = bill_of_materials(version, asked, libraries, time)
    wheel = files[f"{info}/WHEEL"].decode()
    if libraries:
        wheel = wheel.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[f"{info}/WHEEL"] = wheel.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}").encode()
    lines = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    path = folder / pure.name.replace("-any.whl", f"-{tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in [*sorted(files.items()), (record, "".join([*lines, f"{record},,\n"]).encode())]:
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name in libraries else 0o100644) << 16
            archive.writestr(entry, data)
    return path


def write_sdist(made: Path, folder: Path, time: str) -> Path:
    """The source distribution with its entries sorted, of nobody, at one time. It has files where git has links."""
    path = folder / made.name
    with tarfile.open(made) as source, open(path, "wb") as raw:
        entries = sorted(source.getmembers(), key=lambda entry: entry.name)
        if links := [entry.name for entry in entries if entry.issym() or entry.islnk()]:
            raise ReleaseError(f"the source distribution has links: {', '.join(links[:4])}")
        with (
            gzip.GzipFile("", "wb", 9, raw, int(time)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
        ):
            for entry in entries:
                entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = int(time), 0, 0, "", ""
                entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
                entry.pax_headers = {}
                target.addfile(entry, source.extractfile(entry) if entry.isfile() else None)
    return path


def check_wheel(build: ModuleType, path: Path, tag: str) -> None:
    """Sizes, libraries that are whole and of these sources, and glibc's symbols."""
    if path.stat().st_size > MOST_BYTES:
        raise ReleaseError(f"{path.name} has {path.stat().st_size:,} bytes; {MOST_BYTES:,} are allowed")
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if name.startswith(COMPILED)]
        broken = [name for name in names if not build.is_whole(Path(archive.extract(name, folder)))]
    if broken or bool(names) != (tag != ANY):
        raise ReleaseError(f"{path.name} has the libraries {names}, not whole: {broken}")
    if tag.startswith("manylinux"):
        said = run(sys.executable, "-m", "auditwheel", "show", path)
        # Without symbols of a C++ runtime, and of an old glibc, the wheel fits tags older than its own as well.
        fits = re.search(r'platform tag:?\s+"manylinux_2_(\d+)_', said)
        if fits is None or int(fits[1]) > int(tag.split("_")[2]):
            raise ReleaseError(f"auditwheel on {path.name}:\n{said}")


def machine_tag() -> str | None:
    """The tag of this machine, if it is one of a release."""
    known = {("linux", "x86_64"): 0, ("linux", "aarch64"): 1, ("darwin", "arm64"): 2, ("win32", "AMD64"): 3}
    index = known.get((sys.platform, platform.machine()))
    return None if index is None else TARGETS[index].tag


def check_answers(path: Path) -> str:
    """What the README's first command prints with this wheel, in an empty folder, with no compiler on the path."""
    with tempfile.TemporaryDirectory() as folder:
        site, cache = Path(folder, "site"), Path(folder, "cache")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
        (Path(folder) / "empty").mkdir()
        empty = {"PYTHONPATH": str(site), "PATH": "", "CXX": "", "XDG_CACHE_HOME": str(cache), "LLM_CPU_ISA": ""}
        said = run(sys.executable, *FIRST_COMMAND, cwd=Path(folder) / "empty", **empty)
        doctor = "from llm.kernels.state import kernel_state; print(kernel_state().text)"
        state = run(sys.executable, "-c", doctor, cwd=Path(folder) / "empty", **empty)
        if "installed with the package" not in state or any(cache.rglob("*.so")):
            raise ReleaseError(f"{path.name} does not use its own kernels: {state}")
    return said


def make(folder: Path, only: Sequence[str], cache: Path | None) -> list[Path]:
    """The files of the release in `folder`, checked."""
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        time = check_out(tree)
        print(f"commit {run('git', '-C', ROOT, 'log', '-1', '--format=%h %s').strip()}", flush=True)
        setuptools = {"SOURCE_DATE_EPOCH": time, "LLM_BUILD_KERNELS": "0"}
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", Path(scratch, "plain"), tree, **setuptools)
        (pure,), (sdist,) = Path(scratch, "plain").glob("*.whl"), Path(scratch, "plain").glob("*.tar.gz")
        build = load_build(tree)
        print("source distribution", flush=True)
        made.append(write_sdist(sdist, folder, time))
        for tag in only:
            print(tag, flush=True)
            target = next((each for each in TARGETS if each.tag == tag), None)
            libraries = {} if target is None else libraries_of(build, target, cache)
            made.append(write_wheel(pure, folder, tag, libraries, time))
            check_wheel(build, made[-1], tag)
            if tag == machine_tag():
                print(check_answers(made[-1]), flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    return made


def compare(made: Sequence[Path], folder: Path) -> None:
    """Raise unless `folder` has every file with the same bytes."""
    other = [path.name for path in made if (folder / path.name).read_bytes() != path.read_bytes()]
    if other:
        raise ReleaseError(f"other bytes than in {folder}: {', '.join(other)}")


def main(arguments: Sequence[str], show: Callable[[str], None] = print) -> int:
    """0, or 1 where something is wrong with the release."""
    names = [*(target.tag for target in TARGETS), ANY]
    parser = argparse.ArgumentParser(prog="release.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", choices=names, help="these wheels; all by default")
    parser.add_argument("--again", action="store_true", help="compile anew, and compare with what the folder has")
    asked = parser.parse_args(arguments)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "offline-llm", "release")
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    asked.folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = make(Path(scratch), asked.only or names, None if asked.again else cache)
            if asked.again:
                compare(made, asked.folder)
                show("the same bytes")
                return 0
            for path in made:
                shutil.copyfile(path, asked.folder / path.name)
    except ReleaseError as error:
        show(str(error))
        return 1
    lines = []
    for path in sorted(made):
        data = (asked.folder / path.name).read_bytes()
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
        show(f"{len(data):>12,} bytes  {path.name}")
    (asked.folder / "SHA256SUMS").write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
