"""Leaving Python with a model open: nothing is printed, whatever order Python takes things down in."""

from __future__ import annotations

import pytest
from embedded import python

TWO_LINES = """
from llm import LLM
print(LLM().generate("In the beginning", use_tqdm=False)[0].outputs[0].text[:9])
"""
# What json holds, which was imported first, outlives all modules: their names are gone when the model is let go of.
OUTLIVES_ALL_MODULES = """
import json, sys
from llm import LLM, SamplingParams
json.kept = LLM()
print(json.kept.generate("In the beginning", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].text[:9])
json.modules = list(sys.modules.values())
"""
SUSPENDED_STREAM = """
import json, sys
from llm import LLM
json.kept = LLM()
json.stream = json.kept.stream("In the beginning")
print(next(json.stream))
json.modules = list(sys.modules.values())
"""
# As it was: the method looked up `sys` when it ran.
PLANTED = """
import json, sys
from llm import LLM
import llm.llm as facade
exec("import sys\\ndef planted(self):\\n    if not sys.is_finalizing():\\n        self.close()", facade.__dict__)
LLM.__del__ = facade.planted
json.kept = LLM()
json.modules = list(sys.modules.values())
"""


@pytest.mark.parametrize("script", [TWO_LINES, OUTLIVES_ALL_MODULES, SUSPENDED_STREAM])
def test_nothing_is_printed_at_exit(script: str) -> None:
    result = python("-c", script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip()


def test_what_is_printed_at_exit_is_seen() -> None:
    assert "Exception ignored in" in python("-c", PLANTED).stderr
