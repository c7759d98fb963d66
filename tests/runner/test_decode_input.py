"""The input of decode steps that is filled anew is the one that would be made, and their LM head is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import FakeProposer, Recorder, drafting
from embedded import engine_of, open_llm, run
from kernel_sets import has_kernels, needs_compiler
from tiny_models import TINY_MODELS, write_checkpoint

from llm import LLM, SamplingParams
from llm.engine.step import NewRow, SchedulerOutput
from llm.runner.batch import DecodeInput, InputBatch

PROMPTS = [[5, 300, 301, 17], [7, 8], [9], list(range(100, 141))]
GREEDY = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (6, 12, 24, 30)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(block_size=4, speculative_config=None) as opened:
        yield opened


def tokens(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run(llm, PROMPTS, params)]


def state(step: Any) -> list[Any]:
    """All that a step's computation reads, as lists; of block tables the part behind a row's length is never read."""
    batch, lines = step.forward_batch, step.logit_rows
    found = [batch.input_ids, batch.positions, batch.logits_indices, *(vars(batch.metadata[0])[name] for name in NAMES)]
    found += [torch.from_numpy(item) for item in (step.rows, step.counts, lines.rows, lines.positions)]
    metadata = batch.metadata[0]
    table = [row[: -(-length // 4)] for row, length in zip(metadata.block_table, metadata.seq_lens_list, strict=True)]
    return [item.tolist() for item in (*found, *table)] + [metadata.seq_lens_list, metadata.query_lens_list]


NAMES = ("slot_mapping", "query_start_loc", "seq_lens")


@pytest.mark.parametrize("drafts", ["none", "wrong", "right"])
def test_an_input_filled_anew_equals_a_new_one(llm: LLM, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over block boundaries, rows that leave and steps with drafts between, whose blocks the rows get later."""
    filled, fill, make = [], DecodeInput.fill, InputBatch._build

    def compared(self: DecodeInput, batch: InputBatch) -> Any:
        counts = dict(self._counts)
        step = fill(self, batch)
        made = make(batch, type("Plan", (), {"num_scheduled_tokens": counts, "draft_token_ids": {}})())  # type: ignore[arg-type]
        filled.append(len(step.rows))
        assert state(step) == state(made)
        return step

    with drafting(llm, recorder := Recorder()):
        expected = tokens(llm)
    monkeypatch.setattr(DecodeInput, "fill", compared)
    vocab = llm.config.model_config.vocab_size
    proposer = SomeDrafts(drafts, recorder.answers, vocab, most=5) if drafts != "none" else recorder
    with drafting(llm, proposer):
        assert tokens(llm) == expected
    assert filled if drafts == "right" else set(filled) == {1, 2, 3, 4}


class SomeDrafts(FakeProposer):
    """In two of five steps; in the others nothing is drafted."""

    steps = 0

    def _draft(self, batch: Any, row: int) -> list[int]:
        self.steps += 1
        return super()._draft(batch, row) if self.steps // 4 % 5 < 2 else []


@needs_compiler
@pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")
def test_the_head_of_a_recorded_step_is_recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are those of `compute_logits`, which is called as soon as somebody patches it."""
    runner: Any = engine_of(llm).runner
    expected, model, given = tokens(llm), runner.model, []
    assert runner.recorded.refusal is None and "compute_logits" not in vars(model)
    scores = runner.recorded.scores

    def noted(hidden: torch.Tensor) -> Any:
        found = scores(hidden)
        if found is not None:
            logits = model.compute_logits(hidden)
            assert torch.equal(found.logits, logits) and found.tokens.tolist() == logits.argmax(1).tolist()
            given.append(len(hidden))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(runner.recorded, "scores", noted)
        assert tokens(llm) == expected
        assert set(given) == {1, 2, 3, 4} and len(given) > 20
    last = runner.recorded._last[1]
    assert scores(last) is not None and scores(last.clone()) is None
    compute, calls = model.compute_logits, []
    monkeypatch.setattr(model, "compute_logits", lambda hidden: calls.append(len(hidden)) or compute(hidden))
    assert tokens(llm) == expected
    assert len(calls) >= 30


@needs_compiler
@pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")
@pytest.mark.parametrize("row", ["granite", "gemma2-caps"])
def test_a_head_whose_logits_are_scaled_or_capped_is_recorded(row: str, tmp_path: Path) -> None:
    write_checkpoint(TINY_MODELS[row], tmp_path)
    prompts = [[token % 50 for token in prompt] for prompt in PROMPTS]
    with LLM(tmp_path, skip_tokenizer_init=True) as llm:
        run(llm, prompts, GREEDY)
        runner: Any = engine_of(llm).runner
        step, hidden = runner.recorded._last
        logits, *_ = step.head.run()
        assert torch.equal(logits, runner.model.compute_logits(hidden))


@needs_compiler
@pytest.mark.skipif(not has_kernels(), reason="LLM_CPU_ISA=none")
def test_a_recorded_line_without_a_number_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = engine_of(llm).runner
    scores, calls = runner.recorded.scores, []

    def spoilt(hidden: torch.Tensor) -> Any:
        found = scores(hidden)
        if found is not None and len(hidden) == 4:
            calls.append(1)
            if len(calls) == 2:
                found.logits[1], found.largest[1] = float("nan"), float("nan")
        return found

    expected = tokens(llm)
    monkeypatch.setattr(runner.recorded, "scores", spoilt)
    outputs = [output.outputs[0] for output in run(llm, PROMPTS, GREEDY)]
    assert [item.finish_reason for item in outputs] == ["length", "error", "length", "length"]
    assert [item.token_ids for item in outputs[2:]] == expected[2:] and outputs[0].token_ids == expected[0]
    assert outputs[1].token_ids == expected[1][: len(outputs[1].token_ids)]


def new_row(name: str, blocks: list[int]) -> NewRow:
    """Of three tokens, two of them computed."""
    return NewRow(name, [1, 2, 3], 3, 2, [blocks], 0, 0, GREEDY[0], 0, 0, 3)


def test_tables_are_those_of_rows_that_left_and_came_back_and_as_wide_as_they_need_be() -> None:
    batch = InputBatch(2, 16, 1, 2)

    def tables(rows: list[NewRow], removed: list[str]) -> list[list[int]]:
        plan = SchedulerOutput(dict.fromkeys(["a", "b"], 1), rows, removed=removed)
        batch.update(plan)
        step = batch.build(plan)
        batch.append(step.rows, [4, 4])
        batch.settle(step)
        own = step.forward_batch.metadata[0]
        assert own.slot_mapping.tolist() == [
            row[(length - 1) // 2] * 2 + (length - 1) % 2
            for row, length in zip(own.block_table.tolist(), own.seq_lens_list, strict=True)
        ]
        return own.block_table.tolist()

    assert tables([new_row("a", [1, 2, 3]), new_row("b", [4, 5, 6])], []) == [[1, 2], [4, 5]]
    assert tables([], []) == [[1, 2], [4, 5]]
    # The blocks were there before they were needed, as those of drafts that a step leaves out.
    assert tables([], []) == [[1, 2, 3], [4, 5, 6]]
    # Preempted and back, without a step between that is one of decoding.
    assert tables([new_row("a", [9, 8]), new_row("b", [7, 6])], ["a", "b"]) == [[9, 8], [7, 6]]


def test_a_forced_answer_replaces_what_is_sampled(llm: LLM) -> None:
    runner: Any = engine_of(llm).runner
    expected, answer = tokens(llm), [9, 8, 7, 6, 5]
    runner.force_answer(answer)
    try:
        assert tokens(llm) == [(answer + [5] * 40)[: params.max_tokens] for params in GREEDY]
    finally:
        runner.force_answer([])
    assert tokens(llm) == expected
