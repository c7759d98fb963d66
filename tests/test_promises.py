"""docs/reference/promises.md: no public name changes without a line in the changelog, and files stay readable."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from embedded import ROOT, open_llm
from public_names import FIXTURE, table

from llm import LLM, CheckpointError, JobError, SamplingParams
from llm.jobs import identity
from llm.jobs.journal import encode

CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
FILES = ROOT / "tests" / "fixtures" / "release_0.1.0"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void"


def by_name(lines: list[str]) -> dict[str, str]:
    """Name -> what the table has after it."""
    return {line[: len(name)]: line[len(name) :] for line in lines for name in [re.split("[(:]", line)[0]]}


def parts(text: str) -> dict[str, str]:
    """Parameter -> its kind and default, of `(self, prompts, *, use_tqdm=True)`; the members of an enumeration."""
    if not text.startswith("("):
        return dict.fromkeys(re.findall(r"\w+", text), "")
    found = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    given = found.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [ast.unparse(each) for each in given.defaults]
    named = {arg.arg: f"{index}: {value}" for index, (arg, value) in enumerate(zip(positional, defaults, strict=True))}
    for arg, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        named[arg.arg] = f"keyword: {value and ast.unparse(value)}"
    return named | {each.arg: "rest" for each in (given.vararg, given.kwarg) if each}


def changes(before: list[str], now: list[str], is_released: bool = True) -> set[str]:
    """The words that the changelog owes: names that came or went, parameters that came, went or changed.

    Before the first release everything is new, and nothing that came is owed.
    """
    old, new = by_name(before), by_name(now)
    owed = {name.rpartition(".")[2] for name in old.keys() ^ new.keys() if is_released or name in old}
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            first, second = parts(old[name]), parts(new[name])
            looked_at = first.keys() | second.keys() if is_released else first.keys()
            owed |= {part for part in looked_at if first.get(part) != second.get(part)}
    return owed


def untold(owed: set[str], changelog: str) -> set[str]:
    """The words that no code in the newest section of the changelog names."""
    newest = changelog.split("\n## ")[1]
    code = "\n".join(re.findall("`([^`]+)`", newest))
    return {word for word in owed if not re.search(rf"\b{re.escape(word)}\b", code)}


def test_no_public_name_changes_without_a_line_in_the_changelog() -> None:
    is_released = CHANGELOG.count("\n## ") > 1
    owed = untold(changes(FIXTURE.read_text("utf-8").splitlines(), table(), is_released), CHANGELOG)
    assert not owed, f"name in CHANGELOG.md, in backticks and in the newest section, what changed: {sorted(owed)}"


@pytest.mark.parametrize(
    ("before", "now", "owed"),
    [
        ("LLM.run(self, input)", "LLM.run(self, input, *, shard=None)", {"shard"}),
        ("LLM.run(self, a, b)", "LLM.run(self, b, a)", {"a", "b"}),
        ("LLM.run(self, *, a=1)", "LLM.run(self, *, a=2)", {"a"}),
        ("Kind: ONE, TWO", "Kind: ONE", {"TWO"}),
        ("LLM.run(self)", "LLM.walk(self)", {"run", "walk"}),
        ("LLM.run(self, a=(1, 2))", "LLM.run(self, a=(1, 2))", set()),
    ],
)
def test_a_change_is_seen(before: str, now: str, owed: set[str]) -> None:
    assert changes([before], [now]) == owed


def test_before_the_first_release_only_what_was_there_is_owed() -> None:
    before, now = ["f(a, *, b)", "g()"], ["f(a, *, b=1, c)", "h()"]
    assert changes(before, now, is_released=False) == {"b", "g"}
    assert changes(before, now) == {"b", "c", "g", "h"}


def test_an_older_section_tells_of_no_change() -> None:
    changelog = "# Changelog\n\n## 0.2.0\n\n- `LLM.run` takes `shard`.\n\n## 0.1.0\n\n- `walk`\n"
    assert untold({"shard", "walk"}, changelog) == {"walk"}


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """What wrote the files: PyTorch's operations, of the version and numerics that they name."""
    header = json.loads((FILES / "out.jsonl.journal").read_bytes().split(b" ", 1)[1].splitlines()[0])["identity"]
    monkeypatch.setenv("LLM_CPU_ISA", "none")
    monkeypatch.setattr(torch, "__version__", header["torch"])
    monkeypatch.setattr(identity, "NUMERICS_VERSION", header["numerics"])
    with open_llm(max_model_len=96) as llm:
        yield llm


def copied(folder: Path) -> Path:
    """The files of the release, where a test may write. A checkout keeps no private modes."""
    target = folder / "release"
    shutil.copytree(FILES, target)
    return target


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_journal_of_the_release_is_resumed(llm: LLM, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    found = llm.run(folder / "in.jsonl", folder / "out.jsonl", PARAMS, use_tqdm=False, resume=True)
    expected = rows(folder / "expected.jsonl")
    assert found.num_resumed == 2 and found.num_rows == len(expected) == 6
    assert rows(found.output)[:2] == expected[:2]
    assert [row.keys() for row in rows(found.output)] == [row.keys() for row in expected]


def test_a_prompt_cache_of_the_release_is_read(llm: LLM, tmp_path: Path) -> None:
    with open_llm(max_model_len=96, prefix_cache=copied(tmp_path) / "prompts") as again:
        (output,) = again.generate(PROMPT, PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 16


def test_files_of_another_format_are_refused(llm: LLM, tmp_path: Path) -> None:
    """Planted: the journal and the prompt cache are of a version that is not read."""
    folder = copied(tmp_path)
    journal, manifest = folder / "out.jsonl.journal", folder / "prompts" / "prefix_cache.json"
    header, rest = journal.read_bytes().split(b"\n", 1)
    journal.write_bytes(encode(json.loads(header[9:]) | {"journal": 2}) + rest)
    with pytest.raises(JobError, match="has version 2, and 1 is read"):
        llm.run(folder / "in.jsonl", folder / "out.jsonl", PARAMS, use_tqdm=False, resume=True)
    manifest.write_text(manifest.read_text().replace('"prefix_cache": 1', '"prefix_cache": 2'))
    with pytest.raises(CheckpointError, match="version 2, and 1 is read"):
        LLM(prefix_cache=folder / "prompts")
