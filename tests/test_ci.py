"""What CI asks of a run of the tests: enough of them, and none of a kind that must run left out."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import versions
from versions import ROOT

_PATH = Path(__file__).resolve().parents[1] / ".ci" / "check_tests.py"
KINDS = ("test_kernels_cpu", "test_kernels_attention", "test_kernels_fused", "test_kernels_sanitized", "test_api")


@pytest.fixture
def check() -> Any:
    spec = importlib.util.spec_from_file_location("check_tests", _PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(**skipped: str) -> list[ElementTree.Element]:
    """One case per kind; those named are skipped for the reason given."""
    found = []
    for kind in KINDS:
        case = ElementTree.Element("testcase", classname=f"tests.room.{kind}", name="test")
        if kind in skipped:
            ElementTree.SubElement(case, "skipped", message=skipped[kind])
        found.append(case)
    return found


def test_a_whole_run_is_enough(check: Any) -> None:
    assert check.problems(cases(), 5) == ([], [])
    assert check.FLOOR > 7000 and sum(check.KINDS.values()) == 3


def test_too_few_are_an_error(check: Any) -> None:
    assert check.problems(cases(), 6) == (["5 tests passed, at least 6 must"], [])
    failed = cases()
    ElementTree.SubElement(failed[-1], "failure")
    assert check.problems(failed, 5)[0] == ["4 tests passed, at least 5 must"]


def test_kernels_must_run_and_sanitizers_are_told_of(check: Any) -> None:
    errors, notes = check.problems(cases(test_kernels_cpu="no C++ compiler", test_kernels_sanitized="no sanitizers"), 3)
    assert errors == ["no test of test_kernels_cpu ran: no C++ compiler"]
    assert notes == ["no test of sanitized ran: no sanitizers"]
    assert check.problems(cases()[-1:], 1)[0][0] == "no test of test_kernels_cpu ran: there are none"


def test_a_run_at_other_versions_has_one_row_of_the_table() -> None:
    page = "Text.\n\n<!-- versions -->\n| Python | tests | result | commit |\n|---|---|---|---|\n\nMore.\n"
    page = versions.written(page, ("3.11", "all", "9 passed, 1 failed", "aaa"))
    page = versions.written(page, ("3.10", "all", "9 passed", "bbb"))
    page = versions.written(page, ("3.11", "all", "10 passed", "ccc"))
    assert page.splitlines()[4:8] == [
        "|---|---|---|---|",
        "| 3.10 | all | 9 passed | bbb |",
        "| 3.11 | all | 10 passed | ccc |",
        "",
    ]
    assert page.startswith("Text.\n\n<!--") and page.endswith("\n\nMore.\n")
    install = versions.PAGE.read_text("utf-8")
    row = ("3.11", *versions.SHOWN, "all", "1 passed", "ddd")
    assert versions.written(install, row).count("\n") >= install.count("\n")
    head = next(line for line in install.splitlines() if line.startswith("| Python |"))
    assert head.count("|") == len(row) + 1
    with pytest.raises(ValueError, match="no table"):
        versions.written("Text.", row)


def test_the_lowest_versions_are_those_that_pyproject_claims() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = re.findall(r'"([\w-]+)>=([\d.]+)', text.split("dependencies = [")[1].split("]")[0])
    assert len(dependencies) > 6
    found = versions.requirements("lowest", text)
    assert set(found) >= {f"{name}=={version}.*" for name, version in dependencies}
    assert any(requirement.startswith("llguidance==") for requirement in found)
    assert not any(requirement.startswith(("pytest", "ruff", "mypy")) for requirement in found)
    assert versions.requirements("newest", text) == []
