"""Python and C++ agree on every kernel's arguments, and a library that does not is refused."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_sets import TARGETS, needs_compiler

from llm.kernels.cpu import build, library
from llm.kernels.cpu.signatures import FUNCTIONS, KERNELS, Signature, parse
from llm.kernels.reference import gguf_blocks
from llm.kernels.weight import ACTIVATIONS, KINDS

# As quick as a compiler gets: nothing here is run but the exported types.
FLAGS = "-std=c++17 -O0 -w -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti".split()


def in_sources(folder: Path, macro: str) -> dict[str, Signature]:
    """The functions that the sources export by `macro`."""
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.cpp")))
    defined = parse("\n".join(re.findall(r"^LLM_EXPORT (\w+ \w+\([^)]*\))", text, re.MULTILINE)))
    return {name: defined[name] for name in re.findall(rf"^{macro}\((\w+)\)", text, re.MULTILINE)}


def described(signatures: dict[str, Signature]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    return {name: (item.types, item.names) for name, item in signatures.items()}


def test_the_declarations_are_those_of_the_sources(tmp_path: Path) -> None:
    """Names too: two arguments of one type that changed places have equal types."""
    assert described(in_sources(build.SOURCE_FOLDER, "LLM_KERNEL")) == described(KERNELS)
    assert described(in_sources(build.SOURCE_FOLDER, "LLM_FUNCTION")) == described(FUNCTIONS)
    text = (build.SOURCE_FOLDER / "elementwise.cpp").read_text()
    (tmp_path / "elementwise.cpp").write_text(
        text.replace("int64_t rows, int64_t width)", "int64_t width, int64_t rows)")
    )
    assert in_sources(tmp_path, "LLM_KERNEL")["llm_copy_rows"].types == KERNELS["llm_copy_rows"].types
    assert in_sources(tmp_path, "LLM_KERNEL")["llm_copy_rows"].names != KERNELS["llm_copy_rows"].names


def in_header(name: str, enumeration: str) -> list[str]:
    text = (build.SOURCE_FOLDER / name).read_text()
    (members,) = re.findall(rf"enum class {enumeration} : int64_t {{([^}}]*)}}", text)
    return [member.strip().lower() for member in members.split(",")]


def test_kinds_and_activations_have_the_same_numbers() -> None:
    assert in_header("kinds.h", "Kind") == list(KINDS)
    assert in_header("weight.h", "Activations") == list(ACTIVATIONS)
    assert in_header("kinds.h", "BlockType") == [name.lower() for name in gguf_blocks.TYPES]


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_set_loads(target: str) -> None:
    assert library.load_library(target).target == target


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and what they compile to."""
    folder = tmp_path_factory.mktemp("sources")
    for path in (*build.SOURCE_FOLDER.glob("*.cpp"), *build.SOURCE_FOLDER.glob("*.h")):
        shutil.copy(path, folder)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sorted(folder.glob("*.cpp"))))
    return folder


def compile_one(path: Path) -> None:
    command = [build.find_compiler(), *FLAGS, "-c", str(path), "-o", str(path.with_suffix(".o"))]
    subprocess.run(command, check=True)


def linked(objects: Path, folder: Path, before: str, after: str, changed: str = "elementwise.cpp") -> Path:
    """The library, with `after` in the place of `before` in elementwise.cpp, or in a header of linear.cpp."""
    for path in (*objects.glob("*.o"), *objects.glob("*.h"), objects / "linear.cpp"):
        shutil.copy(path, folder)
    text = (objects / changed).read_text()
    assert text.count(before) == 1
    (folder / changed).write_text(text.replace(before, after))
    compile_one(folder / ("linear.cpp" if changed.endswith(".h") else changed))
    path = folder / "library.so"
    subprocess.run([build.find_compiler(), "-shared", *map(str, folder.glob("*.o")), "-o", str(path)], check=True)
    return path


COPY = "llm_copy_rows(const float* x, int64_t stride, float* out, int64_t rows, int64_t width)"


@needs_compiler
def test_unchanged_it_loads(objects: Path, tmp_path: Path) -> None:
    """What the two tests below change is what they are refused for."""
    assert library.Library("plain", linked(objects, tmp_path, COPY, COPY)).target == "plain"


@needs_compiler
@pytest.mark.parametrize(
    ("after", "types"),
    [
        (
            "llm_copy_rows(const float* x, float* out, int64_t stride, int64_t rows, int64_t width)",
            "const float*, float*, int64_t, int64_t, int64_t",
        ),
        (
            "llm_copy_rows(float* x, int64_t stride, float* out, int64_t rows, int64_t width)",
            "float*, int64_t, float*, int64_t, int64_t",
        ),
    ],
    ids=["two arguments have changed places", "one is written into"],
)
def test_other_arguments_are_refused(objects: Path, tmp_path: Path, after: str, types: str) -> None:
    path = linked(objects, tmp_path, COPY, after)
    with pytest.raises(library.SignatureError) as refusal:
        library.Library("plain", path)
    assert str(refusal.value) == (
        "library.so is not loaded: llm_copy_rows is declared as void llm_copy_rows(const float*, int64_t, float*, "
        f"int64_t, int64_t) and compiled as void llm_copy_rows({types})."
    )


@needs_compiler
def test_one_argument_less_is_refused(objects: Path, tmp_path: Path) -> None:
    before = "llm_shift(const int64_t* x, int64_t offset, int64_t* out, int64_t count) {"
    path = linked(
        objects, tmp_path, before, "llm_shift(const int64_t* x, int64_t offset, int64_t* out) { int64_t count = 1;"
    )
    with pytest.raises(
        library.SignatureError, match=r"compiled as void llm_shift\(const int64_t\*, int64_t, int64_t\*\)\."
    ):
        library.Library("plain", path)


@needs_compiler
def test_other_fields_of_a_weight_are_refused(objects: Path, tmp_path: Path) -> None:
    """Two that have changed places, of one type: names are compared here."""
    before, after = "FIELD(int64_t, n)               \\\n    FIELD(int64_t, k)", "FIELD(int64_t, k) FIELD(int64_t, n)"
    path = linked(objects, tmp_path, before, after, "weight.h")
    compared = r"Weight is declared as \{.*int64_t n; int64_t k; .*compiled as \{.*int64_t k; int64_t n; "
    with pytest.raises(library.SignatureError, match=compared):
        library.Library("plain", path)


@needs_compiler
def test_a_kernel_that_is_gone_is_refused(objects: Path, tmp_path: Path) -> None:
    path = linked(objects, tmp_path, "LLM_KERNEL(llm_shift)\n", "")
    with pytest.raises(library.SignatureError, match=r"llm_shift .* the library has no such function"):
        library.Library("plain", path)


def test_a_block_of_arguments_is_checked_for_their_number_and_for_floats() -> None:
    scale = KERNELS["llm_scale"]
    assert scale.names == ("x", "factor", "out", "count", "threads")
    assert struct.unpack("=qdqqq", scale.pack(1, -0.1, 2, 3, 4)) == (1, -0.1, 2, 3, 4)
    for wrong in ((1, 1.0, 2, 3), (None, 1.0, 2, 3, 4), (1, 1.0, 2.5, 3, 4), (1, 1.0, 2, 3, 4, 5)):
        with pytest.raises(struct.error):
            scale.pack(*wrong)
