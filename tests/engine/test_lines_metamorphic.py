"""The metamorphic matrix with drafts: an answer depends on its request alone, whatever is drafted besides.

`test_metamorphic.py` owns requests, settings and the comparison; the answers compared with were computed alone and
without drafts. Models with windows are where a rejected token could free a block too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
from drafts import KINDS, Answers, FakeProposer, Recorder, drafting, fake
from test_metamorphic import PREEMPTED, SETTINGS, Case, check_orders, generate
from tiny_models import TINY_MODELS, one_thread, tiny_checkpoint

from llm import LLM
from llm.engine.block_manager import BlockManager
from llm.engine.request import Request

ROWS = ("llama", "mistral", "qwen2-window", "gemma2", "llama+w8a8")


class DraftedCase(Case):
    @cached_property
    def answers(self) -> Answers:
        with self.load({}) as llm, drafting(llm, recorder := Recorder()):
            generate(llm, self.requests)
        return recorder.answers

    def check(self, llm: LLM, kind: str, name: str = "") -> FakeProposer:
        with drafting(llm, fake(llm, kind, self.answers)) as proposer:
            check_orders(self, llm, name)
        return proposer


@pytest.fixture(scope="module", params=ROWS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftedCase]:
    name, _, quantization = request.param.partition("+")
    row = TINY_MODELS[name]
    if quantization:
        row = replace(row, engine={**row.engine, "quantization": quantization})
    with one_thread():
        yield DraftedCase(row, tiny_checkpoint(name, tmp_path_factory))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_drafts(case: DraftedCase, kind: str) -> None:
    with case.load({"block_size": 4}) as llm:
        proposer = case.check(llm, kind)
    assert proposer.drafted
    assert (proposer.accepted == proposer.drafted) == (kind == "right")
    assert (proposer.accepted == 0) == (kind == "wrong") or kind == "random"


@pytest.mark.parametrize("name", SETTINGS)
def test_nor_do_they_in_any_setting(case: DraftedCase, name: str) -> None:
    with case.load(SETTINGS[name]) as llm:
        proposer = case.check(llm, "partly", name)
    # One token a step leaves no room for drafts.
    assert (proposer.drafted > 0) == (SETTINGS[name].get("max_num_batched_tokens") != 1)


@pytest.mark.parametrize("name", PREEMPTED)
def test_nor_when_they_are_preempted(case: DraftedCase, name: str) -> None:
    with case.load_tight(PREEMPTED[name]) as llm:
        proposer = case.check(llm, "partly", name)
        scheduler: Any = llm._engine.scheduler  # type: ignore[union-attr]
        # Rows with nothing but windows free blocks all the time: with drafts they end before blocks are short.
        assert scheduler.num_preemptions > 0 or case.row is TINY_MODELS["mistral"]
    assert proposer.accepted > 0


def test_a_window_that_counts_drafts_is_seen(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the rows with windows: blocks are freed as if the drafts before had all been accepted."""
    release = BlockManager._release_out_of_window

    def planted(self: BlockManager, request: Request) -> None:
        settled = request.num_computed_tokens
        request.num_computed_tokens += 6
        release(self, request)
        request.num_computed_tokens = settled

    with one_thread():
        case = DraftedCase(TINY_MODELS["mistral"], tiny_checkpoint("mistral", tmp_path_factory))
        with case.load({"block_size": 1, "enable_prefix_caching": False}) as llm:
            case.check(llm, "partly")
            monkeypatch.setattr(BlockManager, "_release_out_of_window", planted)
            with pytest.raises((AssertionError, IndexError)):
                case.check(llm, "partly")
