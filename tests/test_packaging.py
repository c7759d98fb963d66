"""What an installation puts on a machine: one name, `llm`, with everything under it, beside Hugging Face's `kernels`.

Builds real wheels from a copy of the tree, with no network: once directly, once through the source distribution.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("layers", "quantization", "platforms", "kernels")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "work", "*.egg-info")
TEST_COMMAND = "python -m pip install -e '.[test]' && python -m pytest"
FIRST_JOB = 'python -m llm generate "In the beginning"'

_FOUND = (shutil.which(name) for name in (os.environ.get("CXX") or "", "c++", "g++", "clang++") if name)
COMPILER = next(filter(None, _FOUND), None)

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests do not run from a source tree: there is nothing to build"
)


def copy_tree(target: Path) -> Path:
    """Copy what a build reads, links kept as links; build/ left out, its old files would enter the wheel."""
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, target / name)
    for name in ("llm", *ROOMS):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=NOT_SHIPPED)
    return target


def build(tree: Path, out: Path, *arguments: str, kernels: str = "0") -> Path:
    """Build the wheel; `kernels`: the instruction sets whose compiled kernels it carries, "0": none."""
    environment = {**os.environ, "LLM_BUILD_KERNELS": kernels}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *arguments, str(tree)]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    result = subprocess.run(command, stdout=pipe, stderr=both, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-4000:]
    (wheel,) = out.glob("*.whl")
    return wheel


def run_python(code: str, *, cwd: Path, path: list[Path]) -> str:
    """Run `code` in a fresh interpreter from `cwd`, with `path` ahead of the installed packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture(scope="module")
def wheels(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same wheel by both ways: from the source distribution, and from the tree as `pip install .` builds it."""
    through_sdist = build(tree, tmp_path_factory.mktemp("sdist"))
    return {"sdist": through_sdist, "tree": build(tree, tmp_path_factory.mktemp("tree"), "--wheel")}


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with the wheel unpacked into it, flat, and a stand-in for Hugging Face's `kernels`."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheels["tree"]) as archive:
        archive.extractall(folder)
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels" / "__init__.py").write_text("OWNER = 'Hugging Face'\n")
    return folder


def shipped_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        found = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
        return archive.read(found[0]).decode() if found else ""


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_a_relative_link_to_its_folder(room: str) -> None:
    link = ROOT / "llm" / room
    assert link.is_symlink(), f"llm/{room} must be a link; check out with core.symlinks=true"
    assert os.readlink(link) == f"../{room}"
    assert link.is_dir()


def test_no_folder_can_pass_for_hugging_faces_kernels() -> None:
    for folder in (ROOT / "kernels", ROOT / "tests" / "kernels"):
        assert not (folder / "__init__.py").exists(), f"{folder.name}/__init__.py would hide the package `kernels`"


def test_only_top_level_name_is_llm(wheels: dict[str, Path]) -> None:
    assert {name.partition("/")[0] for name in shipped_files(wheels["tree"])} == {"llm"}
    assert metadata(wheels["tree"], "top_level.txt").split() == ["llm"]


def test_wheel_holds_the_tree_and_nothing_else(tree: Path, wheels: dict[str, Path]) -> None:
    expected = set()
    for folder, _, names in os.walk(tree / "llm", followlinks=True):
        expected |= {str(Path(folder, name).relative_to(tree)) for name in names}
    assert shipped_files(wheels["tree"]) == expected
    assert shipped_files(wheels["sdist"]) == expected


@pytest.mark.parametrize(
    "name",
    [
        "llm/py.typed",
        "llm/__main__.py",
        "llm/assets/tiny/config.json",
        "llm/assets/tiny/model.safetensors",
        "llm/assets/tiny/tokenizer.json",
        "llm/assets/tiny/README.md",
        "llm/layers/linear.py",
        "llm/quantization/base.py",
        "llm/platforms/__init__.py",
        "llm/kernels/reference/__init__.py",
    ],
)
def test_wheel_holds(name: str, wheels: dict[str, Path]) -> None:
    assert name in shipped_files(wheels["tree"])


@pytest.fixture(scope="module")
def kernel_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with one source of the kernels: what is tested here is where they go."""
    tree = copy_tree(tmp_path_factory.mktemp("kernels") / "tree")
    for source in (tree / "kernels" / "cpu").glob("*.cpp"):
        if source.name != "threads.cpp":
            source.unlink()
    return tree


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a cache of its own and a compiler that writes a line for each call to `calls`."""
    folder = tmp_path_factory.mktemp("counting")
    compiler = folder / "cxx"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("way", [["--wheel"], []], ids=["tree", "sdist"])
def test_a_wheel_carries_the_kernels_when_there_is_a_compiler(
    way: list[str], kernel_tree: Path, counting: Path, tmp_path: Path
) -> None:
    """And installing again, in whatever way, compiles nothing again: what is compiled lies in the user's cache."""
    wheel = build(kernel_tree, tmp_path / "dist", *way, kernels="plain")
    assert len((counting / "calls").read_text().splitlines()) == 2  # of both ways: one source, and linking
    assert "-py3-none-linux" in wheel.name
    assert {name.partition("/")[0] for name in shipped_files(wheel)} == {"llm"}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from llm.kernels.cpu import build; print(build.ensure_library('plain', announce=print))"
    found = run_python(code, cwd=tmp_path, path=[tmp_path / "site"])  # one line: nothing was compiled again
    assert Path(found).parent == tmp_path / "site" / "llm" / "kernels" / "cpu" / "compiled"


def test_without_a_compiler_the_wheel_is_for_any_platform(
    kernel_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    wheel = build(kernel_tree, tmp_path / "dist", "--wheel", kernels="plain")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in shipped_files(wheel) if name.endswith(".so")]


def test_no_console_script(wheels: dict[str, Path]) -> None:
    # A script named `llm` belongs to the unrelated package of that name; ours is `python -m llm`.
    assert "console_scripts" not in metadata(wheels["tree"], "entry_points.txt")


PROBE = "import kernels, llm, llm.kernels, llm.kernels.reference as r; print(kernels.OWNER, llm.__file__, r.__file__)"


def test_works_beside_hugging_faces_kernels(site: Path, tmp_path: Path) -> None:
    owner, package, reference = run_python(PROBE, cwd=tmp_path, path=[site]).rsplit(" ", 2)
    assert owner == "Hugging Face"
    assert Path(package) == site / "llm" / "__init__.py"
    assert Path(reference) == site / "llm" / "kernels" / "reference" / "__init__.py"


def test_works_beside_hugging_faces_kernels_from_the_source_tree(tree: Path, site: Path) -> None:
    # The root comes first on sys.path here; without an __init__.py its kernels/ gives way to a real package.
    assert run_python(PROBE, cwd=tree, path=[site]).startswith("Hugging Face")


def test_an_init_in_the_root_kernels_would_be_caught(site: Path, tmp_path: Path) -> None:
    spoiled = copy_tree(tmp_path / "tree")
    (spoiled / "kernels" / "__init__.py").write_text("OWNER = 'offline-llm'\n")
    assert run_python(PROBE, cwd=spoiled, path=[site]).startswith("offline-llm")


def test_a_second_top_level_name_would_be_caught(tmp_path: Path) -> None:
    spoiled = copy_tree(tmp_path / "tree")
    project = spoiled / "pyproject.toml"
    project.write_text(
        project.read_text().replace('include = ["llm", "llm.*"]', 'include = ["llm", "llm.*", "kernels"]')
    )
    (spoiled / "kernels" / "__init__.py").write_text('"""Planted."""\n')
    wheel = build(spoiled, tmp_path / "out", "--wheel")
    assert {name.partition("/")[0] for name in shipped_files(wheel)} == {"llm", "kernels"}


def test_readme_and_ci_run_the_same_commands() -> None:
    for name in ("README.md", ".ci/run"):
        text = (ROOT / name).read_text("utf-8")
        assert TEST_COMMAND in text, f"{name} does not run {TEST_COMMAND}"
        assert FIRST_JOB in text, f"{name} does not run {FIRST_JOB}"
