"""The pages of docs/: their code runs, and the reference has every public name. `.ci/run` builds the site."""

from __future__ import annotations

import inspect
import pkgutil
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded import ROOT, python

import llm
from llm.cli import _parser

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
    """Entries that name several: mkdocs refuses those of "Args:", and takes the rest for a type in "Attributes:"."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", inspect.cleandoc(documentation), re.MULTILINE)
    return [entry for section in sections for entry in re.findall(r"^ {4}(\w+(?:, \w+)+)(?: \(.*\))?:", section, re.M)]


def own_documentation() -> Iterator[tuple[str, str]]:
    """(place, docstring) of all that the reference shows and is ours."""
    for place, each in documented_objects():
        if str(getattr(each, "__module__", "")).startswith("llm"):
            yield place, getattr(each, "__doc__", None) or ""


def documented_objects() -> Iterator[tuple[str, object]]:
    for place in DOCUMENTED:
        found = pkgutil.resolve_name(place)
        members = vars(found).values() if inspect.ismodule(found) else [found]
        for each in members:
            yield place, each
            for owner in each.__mro__ if isinstance(each, type) else ():
                yield from ((f"{place}.{name}", member) for name, member in vars(owner).items() if callable(member))


def test_an_entry_of_the_reference_names_one_parameter() -> None:
    assert [(place, entry) for place, text in own_documentation() for entry in joint_entries(text)] == []
    for section in ("Args", "Attributes"):
        assert joint_entries(f"Does.\n\n    {section}:\n        a, b: both.\n        c: one.\n") == ["a, b"]


def lost_tags(documentation: str) -> list[str]:
    """What a browser takes for HTML and does not show: angle brackets outside of code."""
    return re.findall(r"<[A-Za-z/|][^>\n]*>", re.sub(r"`[^`]*`", "", documentation))


def test_the_reference_shows_what_is_between_angle_brackets() -> None:
    assert [(place, tag) for place, text in own_documentation() for tag in lost_tags(text)] == []
    assert lost_tags("the tokens <think> and `</think>`; 1 < 2") == ["<think>"]


def examples(documentation: str) -> list[str]:
    """Indented code of a docstring: after an empty line, and in none of its sections ("Args:"); no numbered list."""
    found, in_section, in_code, after_blank = [], False, False, False
    for line in inspect.cleandoc(documentation).splitlines():
        if line.startswith("    "):
            in_code = not in_section and (in_code or (after_blank and not re.match(r" +\d\.", line)))
            found += [line] if in_code else []
        elif line:
            in_code, in_section = False, re.fullmatch(r"[A-Z][\w, ]+:", line) is not None
        after_blank = not line
    return found


# Where the examples in docstrings run, beside the reference.
EXAMPLES = {
    "llm.config.engine_args": "tests/api/test_vllm_access.py",
    "llm.tools.serve.server.serve": "docs/howto/serve.md",
}


def test_the_examples_of_the_reference_run_elsewhere() -> None:
    found = {}
    for each in (*map(pkgutil.resolve_name, DOCUMENTED), *(member for _, member in documented_objects())):
        if inspect.ismodule(each):
            name = each.__name__
        elif inspect.isclass(each) or inspect.isroutine(each):
            name = f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', '')}"
        else:
            continue
        if name.startswith("llm.") and (lines := examples(each.__doc__ or "")):
            found[name] = [line.strip() for line in lines]
    assert set(found) == set(EXAMPLES)
    for name, place in EXAMPLES.items():
        calls = set(re.findall(r"(\w+)\(", " ".join(found[name])))
        assert calls and calls <= set(re.findall(r"(\w+)\(", (ROOT / place).read_text("utf-8"))), name
    planted = "Does.\n\n    f(1)\n\nArgs:\n    a: one.\n\n        more.\n\nThen:\nso.\n\n    g(2)\n"
    assert examples(planted) == ["    f(1)", "    g(2)"]


def test_the_python_of_the_pages_runs(tmp_path: Path) -> None:
    """Page after page in one interpreter; the blocks of a page go on from one another."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 7
    done = python("-c", "\n".join(blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Moses" in done.stdout and '"city"' in done.stdout


def wrong_commands(text: str) -> list[str]:
    """Lines of shell blocks whose `python -m llm` does not take them, or whose program is not in the repository."""
    wrong = []
    for block in re.findall(r"```(?:bash|text)\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:3] == ["python", "-m", "llm"]:
                try:
                    _, unknown = _parser().parse_known_args(words[3:])
                except SystemExit:
                    unknown = words
                if unknown:
                    wrong.append(line)
            elif words[:1] == ["python"] and words[1].endswith(".py") and not (ROOT / words[1]).is_file():
                wrong.append(line)
    return wrong


def unexplained(text: str) -> list[str]:
    """The blocks of Python that are not run (`py`, not `python`), and have no sentence after them that says so."""
    blocks = re.findall(r"```py\n(.*?)```\n(.*?)(?=\n#|\n```|\Z)", text, re.DOTALL)
    return [block for block, after in blocks if "The tests do not run this" not in after]


def test_the_other_blocks_of_the_pages_can_be_run() -> None:
    """Commands are parsed, not run: most need a model of the hub."""
    text = "\n".join(page.read_text("utf-8") for page in (*PAGES, ROOT / "CONTRIBUTING.md"))
    assert wrong_commands(text) == [] and unexplained(text) == []
    for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL):
        compile(block, "page", "exec")
    planted = "```bash\npython -m llm generate --tempreature 1 x\npython tests/lost.py\n```\n```py\nx = 1\n```\nNo.\n"
    assert len(wrong_commands(planted)) == 2 and unexplained(planted) == ["x = 1\n"]


def test_every_page_and_notebook_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    pages += [f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert [page for page in pages if f": {page}\n" not in menu] == []


def test_a_notebook_is_a_page_with_what_its_cells_show() -> None:
    outputs = [
        {"output_type": "stream", "text": ["10%\r", "100%\n", "done\n"]},
        {"output_type": "display_data", "data": {"image/png": "iVBO\nRw0K", "text/plain": "<Figure>"}},
        {"output_type": "execute_result", "data": {"text/html": ["<table>\n", "\n", "</table>"], "text/plain": "x"}},
        {"output_type": "execute_result", "data": {"text/plain": "`1`"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["f(1)"], "outputs": outputs},
    ]
    page = runpy.run_path(str(ROOT / "tools" / "site_pages.py"))["page_of"]({"cells": cells})
    assert page.split("\n\n") == [
        "# Title",
        "Text.",
        "````python\nf(1)\n````",
        "````output\n100%\ndone\n````",
        "![what the cell shows](data:image/png;base64,iVBORw0K)",
        '<div class="shown">\n<table>\n</table>\n</div>',
        "````output\n`1`\n````\n",
    ]
