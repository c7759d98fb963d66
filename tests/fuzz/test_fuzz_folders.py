"""A bounded share of `folders.py`, and that a finding is seen."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from damage import INDEX, ODD, TEMPLATES, damaged, places
from folders import check_message, run, write_shards

from llm.llm import EMBEDDED_MODEL

SEEDS = range(1000, 1012)


def test_a_few_mutated_folders_raise_only_this_projects_errors(tmp_path: Path) -> None:
    assert list(run(SEEDS, tmp_path)) == []


def test_the_index_of_shards_is_mutated_too(tmp_path: Path) -> None:
    base, names = tmp_path / "base", []
    write_shards(EMBEDDED_MODEL, base)
    for seed in range(40):
        damaged(seed, base, tmp_path / str(seed))
        if (tmp_path / str(seed) / INDEX).read_bytes() != (base / INDEX).read_bytes():
            names.append(seed)
    assert 4 < len(names) < 36


def test_a_finding_is_seen() -> None:
    """Controls: messages that no terminal should show, and places that mutations reach."""
    for bad in ("", "x" * 3000, "\x1b[2J"):
        with pytest.raises(AssertionError):
            check_message(bad)
    assert len(list(places({"a": [1, {"b": 2}], "c": {}}))) == 5
    assert random.Random(1).choice(ODD) == random.Random(1).choice(ODD) and len(TEMPLATES) > 5
    assert json.dumps([value for value in ODD if value == value])
