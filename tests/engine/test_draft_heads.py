"""Heads that draft from the target's hidden states: they draft what they should, and no answer depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints.draft_heads import Eagle3Reference, MultiTokenReference, eager, with_multi_token
from embedded import engine_of
from kernel_sets import has_kernels
from test_metamorphic import PREEMPTED, SETTINGS, Case, check_orders
from tiny_models import TINY_MODELS, VOCAB, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.runner.speculation.head import HeadSource, PlacedHead

pytestmark = pytest.mark.usefixtures("one_core")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@dataclass
class Drafted:
    """A checkpoint with a head. `plain`: of the target by itself; `case`: with the head, and the same answers."""

    plain: Case
    case: Case
    head: MultiTokenReference | Eagle3Reference

    @property
    def prompts(self) -> list[list[int]]:
        """One of them is longer than what waits for the head at most. None begins with another: the last position that
        they shared would have been computed before another token."""
        prompts = make_prompts(self.plain.row)
        return [*prompts, prompts[-1][::-1] + prompts[-2] + prompts[1]]

    def check(self, llm: LLM, answers: list[list[int]]) -> int:
        """Greedy answers are those without drafts, and all drafts the reference's; returns how many were accepted."""
        known = {tuple(prompt): answer for prompt, answer in zip(self.prompts, answers, strict=True)}
        before = engine_of(llm).stats.accepted_tokens
        with eager(llm, answers=known) as proposer:
            assert said(llm, self.prompts) == answers
        assert proposer.made
        for tokens, drafts in proposer.made:
            assert self.head.drafts(tokens, len(drafts)) == drafts, tokens
        return int(engine_of(llm).stats.accepted_tokens - before)


def said(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def made(name: str, to: Path, tmp_path_factory: pytest.TempPathFactory, eagle3: int = 0) -> Drafted:
    """`eagle3`: tokens of a head of EAGLE-3; 0: a head for multi-token prediction."""
    folder, row = tiny_checkpoint(name, tmp_path_factory), TINY_MODELS[name]
    head: MultiTokenReference | Eagle3Reference
    if eagle3:
        head, config = Eagle3Reference(folder, eagle3, own_embedding=eagle3 == VOCAB), {"method": "eagle3"}
        config["model"], to = str(head.write(to / f"{name}-eagle3")), folder
    else:
        head, config = with_multi_token(name, folder, to / name), {"method": "mtp"}
        to = to / name
    plain = Case(row, folder)
    case = Case(replace(row, engine={**row.engine, "speculative_config": config}), to)
    case.__dict__["alone"] = plain.alone
    return Drafted(plain, case, head)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return made("deepseek-v3", tmp_path_factory.mktemp("heads"), tmp_path_factory)


@pytest.fixture(scope="module")
def answers(drafted: Drafted) -> list[list[int]]:
    with drafted.plain.load({"speculative_config": None, "max_model_len": 128}) as llm:
        return said(llm, drafted.prompts)


class TestDrafts:
    def test_are_those_of_the_reference(self, drafted: Drafted, answers: list[list[int]]) -> None:
        with drafted.case.load({"block_size": 4, "max_model_len": 128}) as llm:
            assert drafted.check(llm, answers)
            # Prompts come from the prefix cache, and with them what the head has computed.
            assert drafted.check(llm, answers)

    def test_also_of_prompts_in_chunks(self, drafted: Drafted, answers: list[list[int]]) -> None:
        with drafted.case.load({"max_num_batched_tokens": 7, "block_size": 1, "max_model_len": 128}) as llm:
            assert drafted.check(llm, answers)

    @pytest.mark.parametrize(
        ("name", "eagle3"), [("glm4-moe", 0), ("qwen3-5-moe", 0), ("llama", 100), ("qwen3", VOCAB)]
    )
    def test_and_of_other_heads(
        self, name: str, eagle3: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = made(name, tmp_path, tmp_path_factory, eagle3)
        with other.plain.load({"speculative_config": None, "max_model_len": 128}) as llm:
            answers = said(llm, other.prompts)
        with other.case.load({"max_model_len": 128}) as llm:
            other.check(llm, answers)

    def test_also_in_recorded_steps(self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Which give the hidden states between layers that they have just computed."""
        other = made("llama", tmp_path, tmp_path_factory, 100)
        with other.case.load({"max_model_len": 64}) as llm, eager(llm) as proposer:
            llm.generate([[5, 6, 7, 8]], GREEDY, use_tqdm=False)
            assert not has_kernels() or engine_of(llm).runner.recorded._steps
        assert [other.head.drafts(tokens, len(drafts)) for tokens, drafts in proposer.made] == [
            drafts for _, drafts in proposer.made
        ]

    def test_of_a_row_that_was_one_of_many_are_none(self, drafted: Drafted) -> None:
        with drafted.case.load({"max_num_seqs": 40, "max_model_len": 64}) as llm, eager(llm) as proposer:
            prompts = [[3 + index, 4, 5] for index in range(40)]
            long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            llm.generate(prompts, [long, *[GREEDY] * 39], use_tqdm=False)
            assert not proposer.made
            llm.generate(prompts[:2], GREEDY, use_tqdm=False)
            assert proposer.made


class TestAnswers:
    def test_do_not_depend_on_drafts(self, drafted: Drafted) -> None:
        with drafted.case.load(SETTINGS["one-batch"]) as llm, eager(llm):
            check_orders(drafted.case, llm)
            assert engine_of(llm).stats.drafted_tokens

    def test_nor_when_preempted(self, drafted: Drafted) -> None:
        with drafted.case.load_tight(PREEMPTED["preempted-blocks-of-4"]) as llm, eager(llm):
            check_orders(drafted.case, llm, "preempted-blocks-of-4")
            scheduler: Any = engine_of(llm).scheduler
            assert engine_of(llm).stats.drafted_tokens
            assert scheduler.num_preemptions


def the_hidden_state_before(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = HeadSource._follow
    monkeypatch.setattr(HeadSource, "_follow", lambda *args: follow(*args[:-1], args[-1].roll(1, 0)))


def other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = HeadSource._forward
    monkeypatch.setattr(HeadSource, "_forward", lambda self, batch, rows, firsts, *rest: forward(
        self, batch, rows, firsts - (firsts > 0), *rest
    ))  # fmt: skip


def embedding_and_hidden_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    init = PlacedHead.__init__

    def swapped(self: PlacedHead, module: Any, *args: Any, **kwargs: Any) -> None:
        norms = module.pre_fc_norm_embedding, module.pre_fc_norm_hidden
        module.pre_fc_norm_hidden, module.pre_fc_norm_embedding = norms
        forward = module.forward
        module.forward = lambda embedded, hidden, batch: forward(hidden, embedded, batch)
        init(self, module, *args, **kwargs)

    monkeypatch.setattr(PlacedHead, "__init__", swapped)


@pytest.mark.parametrize("plant", [the_hidden_state_before, other_positions, embedding_and_hidden_swapped])
def test_a_planted_defect_is_seen_in_drafts_and_never_in_answers(
    drafted: Drafted, answers: list[list[int]], plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(monkeypatch)
    with drafted.case.load({"max_model_len": 128}) as llm:
        with eager(llm) as proposer:
            assert said(llm, drafted.prompts) == answers
        assert any(drafted.head.drafts(tokens, len(drafts)) != drafts for tokens, drafts in proposer.made)


def test_a_model_without_a_head_is_refused_in_one_sentence(
    drafted: Drafted, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ValueError, match="names no layer for multi-token prediction") as error:
        LLM(tiny_checkpoint("llama", tmp_path_factory), speculative_config={"method": "deepseek_mtp"})
    assert "\n" not in str(error.value)
    config = {"num_nextn_predict_layers": 1}
    with pytest.raises(ValueError, match=r"no tensors under model\.layers\.2"):
        LLM(drafted.plain.folder, hf_overrides=config, speculative_config={"method": "mtp"})
    head = Eagle3Reference(drafted.plain.folder, 100, own_embedding=False).write(tmp_path / "eagle3")
    with pytest.raises(ValueError, match="reads hidden states of 48 channels, the model's have"):
        LLM(skip_tokenizer_init=True, speculative_config={"method": "eagle3", "model": str(head)})
    with pytest.raises(ValueError, match="folder of what drafts"):
        LLM(drafted.case.folder, speculative_config={"method": "mtp", "model": "other"})


def test_random_rows_draw_what_the_target_would(drafted: Drafted) -> None:
    """Logprobs, which cost time, are not computed for drafts; a draft's token is drawn at its own position."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)
    with drafted.case.load({"max_model_len": 64}) as llm, eager(llm):
        (output,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
        assert llm.stats().drafted_tokens
        assert all(token < VOCAB for token in output.outputs[0].token_ids)
