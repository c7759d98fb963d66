"""The metamorphic matrix with drafts: an answer depends on its request alone, whatever is drafted besides.

`test_metamorphic.py` owns requests, settings and the comparison; the answers compared with were computed alone and
without drafts. Models with windows are where a rejected token could free a block too early, those with recurrent states
where it could stay in a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from drafts import KINDS, Answers, FakeProposer, Recorder, drafting, fake, key_of
from embedded import engine_of
from test_metamorphic import PREEMPTED, SETTINGS, Case, check_orders, generate
from tiny_models import TINY_MODELS, one_thread, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.engine import scheduler
from llm.engine.block_manager import BlockManager
from llm.engine.request import Request
from llm.forward import RecurrentMetadata
from llm.runner.batch import InputBatch

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


@pytest.fixture(scope="module", params=("mamba", "granitemoehybrid"))
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftedCase]:
    """Without attention, and with both."""
    with one_thread():
        yield DraftedCase(TINY_MODELS[request.param], tiny_checkpoint(request.param, tmp_path_factory))


def test_recurrent_states_see_no_rejected_draft(recurrent: DraftedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last time drafts are dropped from steps with more tokens than a few."""
    with recurrent.load({"block_size": 4, "mamba_block_size": 8}) as llm:
        for kind in KINDS:
            proposer = recurrent.check(llm, kind)
            assert proposer.drafted
            assert (proposer.accepted == proposer.drafted) == (kind == "right")
            assert (proposer.accepted == 0) == (kind == "wrong") or kind == "random"
        monkeypatch.setattr(scheduler, "_MOST_WITH_DRAFTS", 24)
        assert 0 < recurrent.check(llm, "partly").drafted < proposer.drafted


class InTurn(FakeProposer):
    """Three drafts in every step, of which none, one, two or all are right."""

    def _draft(self, batch: InputBatch, row: int) -> list[int]:
        done = len(batch.output_token_ids[row])
        answer = self.answers[key_of(batch, row)][done : done + 3]
        return [token if place < done % 4 else (token + 1) % self.vocab_size for place, token in enumerate(answer)]


def test_nor_do_they_in_recorded_steps(recurrent: DraftedCase) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with recurrent.load({"max_model_len": 64}) as llm:
        runner = engine_of(llm).runner
        with drafting(llm, recorder := Recorder()):
            (expected,) = generate(llm, [([3, 5, 7], params)])
        with drafting(llm, InTurn("partly", recorder.answers, llm.config.model_config.vocab_size)) as proposer:
            assert generate(llm, [([3, 5, 7], params)])[0].outputs[0].token_ids == expected.outputs[0].token_ids
        assert 0 < proposer.accepted < proposer.drafted
        assert runner.recorded is None or any(stores_less for *_, stores_less in runner.recorded._steps)


def test_nor_when_they_are_preempted_with_states(recurrent: DraftedCase) -> None:
    with recurrent.load_tight(PREEMPTED["preempted-in-chunks-no-prefix-caching"]) as llm:
        assert recurrent.check(llm, "partly").accepted > 0


@pytest.mark.parametrize("planted", ["rejected", "accepted", "late"])
def test_a_state_of_other_tokens_is_seen(recurrent: DraftedCase, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """The controls: a state sees rejected drafts, or no accepted ones, or one token more than was accepted."""
    store = RecurrentMetadata.store_accepted

    def planted_store(self: RecurrentMetadata, accepted: np.ndarray, upload: Any) -> None:
        if planted == "late" and self.stored is not None:
            most = self.query_start_loc.diff() - self.stored
            store(self, np.minimum(accepted + 1, most.numpy()), upload)

    monkeypatch.setattr(RecurrentMetadata, "store_accepted", planted_store)
    if planted == "rejected":
        monkeypatch.setattr(RecurrentMetadata, "__post_init__", _stores_all, raising=False)
    with recurrent.load({}) as llm, pytest.raises(AssertionError):
        recurrent.check(llm, "partly")


def _stores_all(self: RecurrentMetadata) -> None:
    self.stored = None


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
        own: Any = llm._engine.scheduler  # type: ignore[union-attr]
        # Rows with nothing but windows free blocks all the time: with drafts they end before blocks are short.
        assert own.num_preemptions > 0 or case.row is TINY_MODELS["mistral"]
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
