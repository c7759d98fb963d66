"""README and docs/architecture.md say the truth about the tree, the steps and the places they name."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from embedded import python
from formats_table import overview

from llm.config.arguments import ARGUMENTS, DIFFERENT, differences
from llm.models.registry import _FAMILIES
from llm.quantization import registry
from llm.tools.serve.options import table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
REFERENCE = ROOT / "docs" / "reference"
ROOMS = ("llm", "layers", "quantization", "platforms", "kernels")


def tree_of(page: str) -> list[str]:
    """The paths of the section "The tree": folders end with "/", a * stands for any letters.

    A line is names and what they are for. It is indented below its folder; what goes on with the line before is
    indented further than names are.
    """
    section = page.split("## The tree\n", 1)[1].split("\n## ", 1)[0]
    paths: list[str] = []
    folders: dict[int, str] = {}
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        if 4 <= indent <= 8 and line.strip():
            above = "".join(folder for depth, folder in sorted(folders.items()) if depth < indent)
            names = re.split(r"\s{2,}", line.strip())[0].split(", ")
            folders = {depth: folder for depth, folder in folders.items() if depth < indent}
            if names[0].endswith("/"):
                folders[indent] = names[0]
            paths.extend(above + name for name in names)
    return paths


def unnamed_sources(paths: list[str]) -> list[str]:
    """Python files of the rooms that no line of the tree names, nor lies in a folder that one names."""
    folders = ("platforms/", *(path for path in paths if re.fullmatch(r"\w+/\w.*/", path)))
    found = []
    for room in ROOMS:
        for source in sorted((ROOT / room).rglob("*.py")):
            name = str(source.relative_to(ROOT))
            inside_link = any(name.startswith(f"llm/{linked}/") for linked in ROOMS[1:])
            named = name.startswith(folders) or any(fnmatch(name, path) for path in paths)
            if not inside_link and not named and name != f"{room}/__init__.py":
                found.append(name)
    return found


def test_every_path_of_the_tree_exists() -> None:
    paths = tree_of(ARCHITECTURE)
    assert len(paths) > 60
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_the_tree_names_every_source_file_or_its_folder() -> None:
    assert unnamed_sources(tree_of(ARCHITECTURE)) == []


@pytest.mark.parametrize(
    "lost", ["llm/cli.py", "layers/latent_attention.py", "quantization/description.py", "kernels/backend.py"]
)
def test_a_lost_line_is_seen(lost: str) -> None:
    assert unnamed_sources([path for path in tree_of(ARCHITECTURE) if path != lost]) != []


def test_every_file_that_is_named_in_passing_exists() -> None:
    rooms = "|".join((*ROOMS, "tests", "notebooks", "docs"))
    named = re.findall(rf"`((?:{rooms})/[\w./]*)`", README + PAGES)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def lost_links(text: str) -> list[str]:
    """Links of the README to places of the tree that are not there, or to headings that it does not have."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = target.partition("#")
        if not (ROOT / path).exists() or (not path and heading not in headings):
            found.append(target)
    return found


def test_every_link_of_the_readme_leads_somewhere() -> None:
    assert len(re.findall(r"\]\(docs/", README)) > 20 and lost_links(README) == []
    assert lost_links("[a](docs/none.md) [b](#none)") == ["docs/none.md", "#none"]


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    """In order, in a fresh interpreter: the last block replaces an operation for good."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    done = python("-c", "\n".join(blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("In the beginning ") and "max_model_len" in done.stdout and "rms_norm" in done.stdout


def differences_of(page: str) -> str:
    return page.split("<!-- differences -->\n\n", 1)[1].split("\n\n<!-- end of differences -->", 1)[0]


def test_the_differences_from_vllm_are_those_of_the_tables() -> None:
    """`python -m llm.config.arguments` prints what belongs between the two comments."""
    assert differences_of((REFERENCE / "differences.md").read_text()) == differences()


def test_the_options_of_the_server_are_those_of_the_table() -> None:
    """`python -m llm.tools.serve.options` prints what belongs between the two comments."""
    page = (REFERENCE / "differences.md").read_text()
    assert page.split("<!-- serve -->\n", 1)[1].split("\n<!-- end of serve -->", 1)[0] == table()


def test_the_formats_are_those_that_are_registered() -> None:
    """`python tests/formats_table.py` prints what belongs between the two comments."""
    page = (REFERENCE / "formats.md").read_text()
    section = page.split("<!-- formats -->\n", 1)[1].split("\n<!-- end of formats -->", 1)[0]
    assert section == overview() and "| gptq | 2, 3, 4, 8 bits" in section


def test_a_format_without_a_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILTIN_CONFIGS, "novel", "novel:Config")
    with pytest.raises(LookupError, match=r"the registered formats differ: \['novel'\]"):
        overview()


def test_every_argument_of_the_table_is_told_once_or_honoured() -> None:
    told = differences()
    for name, argument in ARGUMENTS.items():
        assert len(re.findall(rf"`{name}`", told.split("Refused,")[1])) == (argument.status != "honoured"), name
    assert {name for names in DIFFERENT for name in names.split(", ")} <= {
        name for name, argument in ARGUMENTS.items() if argument.status == "honoured"
    }
    assert "| `max_tokens` | default None, until the context is full; vLLM: 16 |" in told


def test_the_counts_of_architectures_are_those_of_the_table() -> None:
    """`python tests/models/architectures.py --write` writes it."""
    lines = (ROOT / "tests" / "models" / "ARCHITECTURES.md").read_text().splitlines()
    ran = [line for line in lines if "| backend |" in line]
    count, native, backend, refused, neither = map(int, re.findall(r"\d+", lines[2]))
    by_row, invariant = (sum(words in line for line in ran) for words in ("row by row", "| backend | yes |"))
    told = " ".join((REFERENCE / "models.md").read_text().split())
    assert len(ran) == backend and sum("| native |" in line for line in lines) == native
    assert (
        f"Of the {count} in 5.23, {native} run natively, {backend} on transformers' code ({by_row} of them row by row, "
        f"{invariant} batch-invariant), {refused} are refused, and of {neither} no tiny one could be built." in told
    )
    assert f"Of {count} causal architectures {native} run natively and {backend} on" in README


def test_the_families_of_the_reference_are_those_that_are_registered() -> None:
    page = (REFERENCE / "models.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == ["model_type", *sorted(_FAMILIES)]
