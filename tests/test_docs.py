"""The pages of docs/: their code runs, and the reference has every public name. `.ci/run` builds the site."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded import ROOT, python

import llm

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTED = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text("utf-8") for page in PAGES), re.MULTILINE)


def undocumented(documented: list[str]) -> list[str]:
    """Public names of `llm` that neither stand in the reference themselves nor are in a module that does."""
    found = []
    for name, module in llm._PUBLIC.items():
        own = getattr(getattr(llm, name), "__name__", name)  # another one, where the name is an alias
        places = {place for place in documented if place == module or place.endswith(f".{own}")}
        if not places and module != "llm.stand_ins":
            found.append(name)
    return found


def test_the_reference_has_every_public_name() -> None:
    assert undocumented(DOCUMENTED) == []


@pytest.mark.parametrize("lost", ["llm.llm.LLM", "llm.outputs", "llm.sampling_params.SamplingParams"])
def test_a_name_without_a_page_is_seen(lost: str) -> None:
    assert undocumented([name for name in DOCUMENTED if name != lost]) != []


def joint_entries(documentation: str) -> list[str]:
    """Entries of "Args:" that name several parameters, which `mkdocs build --strict` refuses."""
    sections = re.findall(r"^Args:\n((?: {4}.*\n?|\n)*)", inspect.cleandoc(documentation), re.MULTILINE)
    return [entry for section in sections for entry in re.findall(r"^ {4}(\w+(?:, \w+)+)(?: \(.*\))?:", section, re.M)]


def documented_objects() -> Iterator[tuple[str, object]]:
    for place in DOCUMENTED:
        found = pkgutil.resolve_name(place)
        members = vars(found).values() if inspect.ismodule(found) else [found]
        for each in members:
            yield place, each
            for owner in each.__mro__ if isinstance(each, type) else ():
                yield from ((f"{place}.{name}", member) for name, member in vars(owner).items() if callable(member))


def test_an_entry_of_the_reference_names_one_parameter() -> None:
    found = [
        (place, entry)
        for place, each in documented_objects()
        if str(getattr(each, "__module__", "")).startswith("llm")
        for entry in joint_entries(getattr(each, "__doc__", None) or "")
    ]
    assert found == []
    assert joint_entries("Does.\n\n    Args:\n        a, b: both.\n        c: one.\n") == ["a, b"]


def test_the_python_of_the_pages_runs(tmp_path: Path) -> None:
    """Page after page in one interpreter; the blocks of a page go on from one another."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 7
    done = python("-c", "\n".join(blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Moses" in done.stdout and '"city"' in done.stdout


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [page.name for page in PAGES if f": {page.relative_to(ROOT / 'docs')}\n" not in menu] == []
