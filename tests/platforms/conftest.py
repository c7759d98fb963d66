"""What tests of platforms and plugins share: nothing that a test loads is seen by the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm import plugins


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads is forgotten afterwards."""
    for name in ("LLM_PLUGINS", "LLM_PLUGIN_ERRORS", "LLM_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_loaded", "_answers"):
        monkeypatch.setattr(plugins, name, {})
    monkeypatch.setattr(plugins, "_called", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("made_up"):
            del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path
