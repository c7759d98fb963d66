"""A bounded share of `folders.py`, and that a finding is seen."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from folders import ODD, TEMPLATES, check_message, places, run

SEEDS = range(1000, 1012)


def test_a_few_mutated_folders_raise_only_this_projects_errors(tmp_path: Path) -> None:
    assert list(run(SEEDS, tmp_path, seconds_per_seed=120)) == []


def test_a_finding_is_seen() -> None:
    """Controls: messages that no terminal should show, and places that mutations reach."""
    for bad in ("", "x" * 3000, "\x1b[2J"):
        with pytest.raises(AssertionError):
            check_message(bad)
    assert len(list(places({"a": [1, {"b": 2}], "c": {}}))) == 5
    assert random.Random(1).choice(ODD) == random.Random(1).choice(ODD) and len(TEMPLATES) > 5
    assert json.dumps([value for value in ODD if value == value])
