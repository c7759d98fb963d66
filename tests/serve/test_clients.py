"""Clients that are heavy to install, where they are installed: what they get is what the library answers."""

from __future__ import annotations

from collections.abc import Iterator

import clients
import harness
import pytest
from embedded import assert_idle, open_llm

import llm as package
from llm import LLM

INSTALL = "pip install langchain-openai litellm 'lm-eval[api]'"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LLM, str]]:
    with open_llm(max_model_len=512) as llm:
        with package.serve(llm, port=0) as url:
            yield llm, url
        assert_idle(llm)


@pytest.mark.parametrize("name", ["langchain", "litellm"])
def test_a_client_gets_the_librarys_answers(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip({"langchain": "langchain_openai"}.get(name, name), reason=INSTALL)
    getattr(clients, name)(*request.getfixturevalue("served"))


def test_lm_evaluation_harness_scores_the_same_over_http() -> None:
    pytest.importorskip("lm_eval", reason=INSTALL)
    pytest.importorskip("tenacity", reason=INSTALL)  # of lm-eval[api]
    harness.main()
