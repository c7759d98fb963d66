"""Sources of drafts, how many are drafted, and that answers do not depend on it.

`test_drafts_metamorphic.py` proves verification with every kind of proposer; here are this library's own.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drafts import drafting
from embedded import engine_of, open_llm, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import has_kernels
from safetensors.torch import load_file, save_file
from same_answers import CACHE
from test_drafts_verified import assert_same
from test_metamorphic import PREEMPTED, SETTINGS, Case, check_orders
from tiny_models import TINY_MODELS, VOCAB, one_thread, tiny_checkpoint, write_checkpoint

from llm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from llm.config.engine import LLMArgs, SpeculativeConfig
from llm.errors import OutOfMemoryError
from llm.llm import EMBEDDED_MODEL
from llm.runner.speculation.draft_model import DraftModelSource
from llm.runner.speculation.lookup import ForcedSource, NgramSource, SuffixAutomaton
from llm.runner.speculation.speculator import Chances, Choice, Speculator, StepTimes, choose


class Eager(Speculator):
    """Drafts as many tokens as it is offered, whatever they cost."""

    def _counts(self, rows: int, choices: Mapping[int, Choice]) -> dict[int, int]:
        return {row: choice.most for row, choice in choices.items()}


def ngrams(most: int = 7) -> Eager:
    return Eager((ForcedSource(), NgramSource(1)), most)


def eager(llm: LLM) -> Eager:
    """With the sources that the LLM was built with."""
    return Eager(engine_of(llm).runner.proposer._sources, 3)


def longest_repeat(tokens: Sequence[int]) -> int:
    """The length of the longest suffix that occurs before, by definition."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[-length:]
        if any(tokens[start : start + length] == suffix for start in range(len(tokens) - length)):
            return length
    return 0


@given(st.lists(st.integers(0, 2), max_size=40))
@settings(max_examples=60)
def test_the_longest_repeated_suffix_is_found(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, 1):
        automaton.push(token)
        length, end = automaton.repeat_length, automaton.repeat_end
        assert length == longest_repeat(tokens[:count])
        if length:
            assert end < count - 1
            assert tokens[end + 1 - length : end + 1] == tokens[count - length : count]
    assert len(automaton._link) <= max(2, 2 * len(tokens))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with one_thread():
        yield Case(TINY_MODELS["mistral"], tiny_checkpoint("mistral", tmp_path_factory))


class TestAnswers:
    """The metamorphic matrix with drafts of repeated tokens: what tiny random models say repeats."""

    @pytest.mark.parametrize("name", ["one-batch", "chunks-of-3-blocks-of-1", "one-row-blocks-of-4"])
    def test_do_not_depend_on_drafts(self, case: Case, name: str) -> None:
        with case.load(SETTINGS[name]) as llm, drafting(llm, ngrams()):
            check_orders(case, llm, name)
            assert engine_of(llm).stats.drafted_tokens

    def test_nor_when_preempted(self, case: Case) -> None:
        with case.load_tight(PREEMPTED["preempted-blocks-of-4"]) as llm, drafting(llm, ngrams()):
            check_orders(case, llm, "preempted-blocks-of-4")
            assert engine_of(llm).stats.drafted_tokens

    def test_a_model_that_drafts_for_itself_is_always_right(self, case: Case) -> None:
        """At any temperature: it draws what the row draws. So every draft is accepted, and the answers are the same."""
        config = {"model": str(case.folder), "num_speculative_tokens": 3}
        with case.load({"speculative_config": config}) as llm, drafting(llm, eager(llm)):
            check_orders(case, llm)
            stats = engine_of(llm).stats
            assert 0 < stats.accepted_tokens == stats.drafted_tokens

    def test_another_model_is_mostly_wrong(self, case: Case, tmp_path: Path) -> None:
        config = {"model": str(_with_other_weights(case.folder, tmp_path / "other"))}
        with case.load({"speculative_config": config}) as llm, drafting(llm, eager(llm)):
            check_orders(case, llm)
            stats = engine_of(llm).stats
            assert stats.accepted_tokens < stats.drafted_tokens / 2

    def test_a_token_that_the_model_does_not_have_ends_a_draft(self, case: Case, tmp_path: Path) -> None:
        """A draft model may have more ids, for padding: the first of them is one too many."""
        draft = TINY_MODELS["mistral"]
        draft = replace(draft, config={**draft.config, "vocab_size": VOCAB + 1})
        write_checkpoint(draft, tmp_path / "draft")
        tensors = load_file(tmp_path / "draft" / "model.safetensors")
        tensors["lm_head.weight"][:-1] /= 100  # half of the time the padding is the likeliest
        save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
        config = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
        with case.load({"speculative_config": config}) as llm, drafting(llm, eager(llm)) as proposer:
            drafted: list[int] = []
            source = next(source for source in proposer._sources if isinstance(source, DraftModelSource))
            draft_of = source.draft

            def seen(batch: Any, counts: Any) -> Any:
                found = draft_of(batch, counts)
                drafted.extend(token for tokens in found.values() for token in tokens)
                return found

            source.draft = seen  # type: ignore[method-assign]
            check_orders(case, llm)
            assert drafted and max(drafted) < VOCAB


def _with_other_weights(folder: Path, other: Path) -> Path:
    shutil.copytree(folder, other)
    for path in other.glob("*.safetensors"):
        save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(path).items()}, path)
    return other


SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 5}, "married": {"type": "boolean"}},
    "required": ["first_name", "married"],
    "additionalProperties": False,
}
TEXT = "And God said, Let there be light: and there was light. "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=256, speculative_config={"method": "ngram"}, **CACHE) as llm:
        yield llm


def requests() -> tuple[list[str], list[SamplingParams]]:
    schema = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=1),
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=schema),
        SamplingParams(temperature=1, seed=3, max_tokens=40, structured_outputs=schema, n=2),
        SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=24, stop=["light"], min_tokens=2),
        SamplingParams(temperature=0.7, seed=1, max_tokens=24, bad_words=["God"], logit_bias={5: 1.0}),
    ]
    return [TEXT * 2] * len(params), params


def test_parameters_processors_and_grammars_see_only_what_was_accepted(llm: LLM) -> None:
    with drafting(llm, None):
        without = run(llm, *requests())
    steps = engine_of(llm).stats.steps
    with drafting(llm, ngrams()):
        assert_same(without, run(llm, *requests()))
    assert engine_of(llm).stats.accepted_tokens
    assert engine_of(llm).stats.steps - steps < steps


def test_a_grammar_s_forced_tokens_take_one_step(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA))

    def steps() -> int:
        before = engine_of(llm).stats.steps
        llm.generate("A king:", params, use_tqdm=False)
        return int(engine_of(llm).stats.steps - before)

    with drafting(llm, None):
        without = steps()
    with drafting(llm, Eager((ForcedSource(),), 15)):
        assert steps() < 0.8 * without


class TestPace:
    """Times are made up: what matters is which drafts pay."""

    @staticmethod
    def times(per_step: float, per_line: float) -> StepTimes:
        times = StepTimes()
        for lines in range(1, 65):
            for _ in range(5):
                times.add(lines, lines, per_step + per_line * lines)
        return times

    def test_drafts_are_free_where_reading_the_weights_binds(self) -> None:
        free = self.times(1.0, 0.0)
        assert choose(1, {0: Choice(7, 0.3)}, free) == {0: 7}
        assert choose(2, {0: Choice(7, 0.3), 1: Choice(3, 0.01)}, free) == {0: 7, 1: 3}

    def test_and_do_not_pay_where_arithmetic_binds(self) -> None:
        bound = self.times(0.0, 1.0)
        assert choose(1, {0: Choice(7, 0.99)}, bound) == {}
        assert choose(8, {row: Choice(7, 0.99) for row in range(8)}, bound) == {}

    def test_between_they_pay_for_rows_that_accept(self) -> None:
        between = self.times(1.0, 0.2)
        assert choose(2, {0: Choice(7, 0.95), 1: Choice(7, 0.05)}, between) == {0: 7}

    def test_drafts_that_cost_more_than_a_step_are_not_made(self) -> None:
        free = self.times(1.0, 0.0)
        assert choose(1, {0: Choice(7, 0.9, seconds_per_draft=1.0)}, free) == {}
        assert choose(1, {0: Choice(7, 0.9, seconds_per_draft=0.01)}, free) == {0: 7}

    def test_without_any_times_nothing_is_drafted(self) -> None:
        assert choose(1, {0: Choice(7, 1.0)}, StepTimes()) == {}

    @pytest.mark.parametrize("per_line", [0.01, 0.05, 0.2])
    def test_a_row_that_never_accepts_costs_three_percent_at_most(self, per_line: float) -> None:
        times, chances = self.times(1.0, per_line), Chances()
        spent = 0.0
        for _ in range(256):
            counts = choose(1, {0: Choice(7, chances.of("row", "kind"))}, times)
            if counts:
                chances.add("row", "kind", counts[0], 0)
            else:
                chances.fade("row")
            spent += 1.0 + per_line * (1 + counts.get(0, 0))
        assert spent < 1.03 * 256 * (1.0 + per_line)

    def test_a_row_that_accepts_is_found_again(self) -> None:
        """After text that never repeated, a copy begins: most of it is drafted."""
        times, chances, drafted = self.times(1.0, 0.05), Chances(), 0
        for token in range(400):
            copies = token >= 200
            counts = choose(1, {0: Choice(7, chances.of("row", "kind"))}, times)
            if counts:
                chances.add("row", "kind", counts[0], counts[0] if copies else 0)
                drafted += copies
            else:
                chances.fade("row")
        assert drafted > 150

    @pytest.mark.parametrize("rows", [1, 2])
    def test_sources_that_had_no_offer_for_long_are_asked_seldom(self, rows: int) -> None:
        """And only those: of more rows than were measured, steps are looked at, so that they are."""
        proposer = Speculator((NgramSource(2),), 7)
        tokens = np.arange(600, dtype=np.int32).reshape(2, 300)
        tokens[:, 200:] = tokens[:, 100:200]
        batch: Any = SimpleNamespace(
            token_ids=tokens,
            num_tokens=np.array([1, 1]),
            request_ids=["0-0", "1-0"][:rows],
            params=[SamplingParams(max_tokens=None)] * rows,
            output_token_ids=[[]] * rows,
        )
        looked = []
        for step in range(220):
            batch.num_tokens += 1
            if proposer.looks(batch):
                looked.append(step)
        assert looked[:8] == list(range(8))
        again = [step for step in looked[8:] if step < 200]
        assert again == ([] if rows == 1 else list(range(11, 200, 4)))
        assert looked[-1] > 200

    def test_measured_times_replace_the_expected_ones(self) -> None:
        times = StepTimes()
        times.add(64, 1, 6.4)  # the first prompt meets cold weights, and does not count
        times.add(64, 1, 0.64)  # 10 ms a token
        for _ in range(5):
            times.add(1, 1, 0.020)
        assert times.seconds(4) == pytest.approx(0.050)
        for _ in range(4):
            times.add(8, 8, 0.1)
        assert times.seconds(4) == pytest.approx(0.050)
        times.add(8, 8, 0.027)
        assert times.seconds(8) == 0.027
        assert times.seconds(4) == pytest.approx(0.020 + 3 / 7 * 0.007)


def test_what_was_drafted_and_accepted_is_counted() -> None:
    with open_llm(max_model_len=256, speculative_config="auto") as llm:
        with drafting(llm, ngrams()):
            output = llm.generate(TEXT * 3, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
        metrics, stats = output.metrics, engine_of(llm).stats
        assert metrics is not None
        assert (metrics.num_drafted_tokens, metrics.num_accepted_tokens) == (
            stats.drafted_tokens,
            stats.accepted_tokens,
        )
        assert 0 < metrics.num_accepted_tokens <= metrics.num_drafted_tokens
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        assert counts["vllm:spec_decode_num_accepted_tokens"] == metrics.num_accepted_tokens


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("fast", "speculative_config must be 'auto', None, or a dict"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "heads of EAGLE 1 and 2 are not read; use 'ngram', "),
        ({"num_speculative_token": 2}, "Did you mean 'num_speculative_tokens'?"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 63, got 0"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_max must be an integer of at least 4"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer of at least 1, got 0"),
        ({"method": "draft_model"}, "must be the folder of what drafts"),
        ({"draft_tensor_parallel_size": 2}, "a model runs on one device"),
    ],
)
def test_a_wrong_config_is_one_sentence(wrong: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        LLM(speculative_config=wrong)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_vllms_older_name_of_the_method() -> None:
    for name in ("ngram", "[ngram]"):
        assert SpeculativeConfig.of({"model": name}) == SpeculativeConfig.of({"method": "ngram"}) == SpeculativeConfig()
    with pytest.raises(ValidationError, match="with method='draft_model' or 'eagle3' only"):
        SpeculativeConfig.of({"model": "folder", "method": "ngram"})


def test_a_draft_model_has_the_same_tokens(tmp_path: Path) -> None:
    """Two tokens exchange their ids."""
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    vocabulary = definition["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)[300:]
    random.Random(0).shuffle(names)
    vocabulary.update(zip(names, sorted(vocabulary[name] for name in names), strict=True))
    path.write_text(json.dumps(definition), "utf-8")
    with pytest.raises(ValueError, match="has another tokenizer"):
        LLM(speculative_config={"model": str(tmp_path / "draft")})


def test_a_draft_model_that_does_not_fit_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OutOfMemoryError("the weights take 9 bytes and 8 are free.")

    monkeypatch.setattr("llm.setup.drafts.make_plan", refuse)
    with pytest.raises(OutOfMemoryError, match=r"\(the weights take 9 bytes and 8 are free\); a draft model's weights"):
        LLM(speculative_config={"model": str(EMBEDDED_MODEL)})


def test_the_config_says_what_drafts() -> None:
    assert str(SpeculativeConfig.of("auto")) == "ngram, at most 7 drafts"
    with open_llm(max_model_len=64, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert "speculative_config       ngram, at most 3 drafts  (asked for; answers do not depend on it)" in str(
            llm.config
        )
        assert [part.runs for part in llm.explain().parts if part.kind == "drafts"] == ["ngram, at most 3 drafts"]
    with open_llm(max_model_len=64, speculative_config=None) as llm:
        assert llm.config.speculative_config is None
        assert engine_of(llm).runner.proposer is None
        assert "drafts" not in {part.kind for part in llm.explain().parts}


def test_the_default_drafts_where_nothing_can_change() -> None:
    with open_llm(max_model_len=64, speculative_config="auto") as llm:
        assert (engine_of(llm).runner.proposer is not None) == has_kernels()
    assert LLMArgs("model").speculative_config == "auto" == signature(LLM).parameters["speculative_config"].default
