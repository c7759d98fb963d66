"""`LLM.verify`, `LLM.selfcheck` and `LLM.compare`: they find nothing where nothing is wrong, and what is planted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import assert_idle, engine_of, open_llm, run
from kernel_sets import has_kernels
from test_html import Checker
from tiny_models import TINY_MODELS, write_checkpoint

from llm import LLM, SamplingParams, ValidationError
from llm.base.optional import quiet
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.errors import OutOfMemoryError
from llm.llm import EMBEDDED_MODEL
from llm.platforms.cpu import CpuPlatform
from llm.tools.quantization_report import TextScores, change_interval, perplexity_interval

TEXTS = ["In the beginning God created the heaven and the earth.", "And the king said unto them, Go up. " * 6]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=256, kv_cache_dtype="float32") as llm:
        yield llm


def test_it_agrees_with_transformers_and_says_what_explains_the_rest(llm: LLM) -> None:
    found = llm.verify(TEXTS)
    assert found.agrees and found.loaded == found.exact and found.explained == ()
    assert found.exact.largest < 1e-4 and found.exact.agreement == 1.0 and found.positions > 50
    with open_llm(max_model_len=256, quantization="w4a8") as rounded:
        other = rounded.verify(TEXTS)
        assert len(run(rounded, "And")[0].outputs[0].token_ids) > 0
    assert other.agrees and other.exact.largest == found.exact.largest
    assert other.loaded.largest > 100 * other.exact.largest and other.loaded.agreement < 1.0 < 1 + other.loaded.margin
    assert other.explained == ("quantization='w4a8'", "kv_cache_dtype=bfloat16")
    assert "explained by quantization='w4a8', kv_cache_dtype=bfloat16" in str(other)


def test_a_wrong_weight_is_no_rounding(llm: LLM) -> None:
    def bend(model: Any) -> None:
        model.model.layers[1].input_layernorm.weight.data *= 1.05

    with open_llm(max_model_len=256, kv_cache_dtype="float32") as wrong:
        wrong.apply_model(bend)
        found = wrong.verify(TEXTS)
    assert not found.agrees and "is NOT explained by rounding" in str(found)


def test_what_cannot_be_verified_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="pass a list of texts"):
        llm.verify("one")
    with open_llm(load_format="dummy", max_model_len=64) as random_weights, pytest.raises(ValidationError) as refused:
        random_weights.verify(TEXTS)
    assert "against=" in str(refused.value)
    with open_llm(quantization="w8a8", max_model_len=256) as llm8:
        llm8.save_quantized(tmp_path / "saved")
    with open_llm(tmp_path / "saved", max_model_len=256) as saved:
        with pytest.raises(ValidationError, match="against="):
            saved.verify(TEXTS)
        assert saved.verify(TEXTS, against=EMBEDDED_MODEL).agrees
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: 1 << 20)
    with pytest.raises(OutOfMemoryError, match="transformers' model takes"):
        llm.verify(TEXTS)


@pytest.mark.skipif(not has_kernels(), reason="PyTorch's operations depend on the batch")
def test_answers_are_the_same_bits_in_any_company(llm: LLM) -> None:
    found = llm.selfcheck()
    assert found.ok and found.promised and "in one fixed order" in str(found)
    assert all(setting.happened for setting in found.settings)
    assert found.settings[-1].happened == 5  # prompts of a block and more; within one batch only the last hits
    assert_idle(llm)
    assert engine_of(llm).scheduler.config == llm.config.scheduler_config


Change = Callable[[RunnerOutput], None]


def another_token(result: RunnerOutput) -> None:
    next(iter(result.sampled_token_ids.values()), [0])[0] ^= 1


def another_logprob(result: RunnerOutput) -> None:
    for items in list(result.logprobs.values())[:1]:
        items[0].logprobs[0] = math.nextafter(items[0].logprobs[0], 0.0)


@pytest.mark.parametrize(("change", "said"), [(another_token, "token "), (another_logprob, "their logprobs are not")])
def test_what_depends_on_the_batch_is_seen(
    llm: LLM, change: Change, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit is wrong wherever two requests share a step."""
    runner = engine_of(llm).runner
    execute = runner.execute

    def wrong(plan: SchedulerOutput) -> RunnerOutput:
        result: RunnerOutput = execute(plan)
        if len(plan.num_scheduled_tokens) > 1:
            change(result)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", wrong)
        found = llm.selfcheck()
    assert not found.ok and said in next(setting.difference for setting in found.settings if setting.difference)
    assert found.settings[0].difference in str(found)


def test_a_failure_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("And", SamplingParams(max_tokens=20))
    next(stream)
    with pytest.raises(ValidationError, match="end the stream first"):
        llm.selfcheck()
    stream.close()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        patch.setattr(engine_of(llm).runner, "execute", lambda plan: (_ for _ in ()).throw(RuntimeError("planted")))
        llm.selfcheck()
    assert_idle(llm)
    assert engine_of(llm).scheduler.config == llm.config.scheduler_config
    assert len(run(llm, ["And", "The"])) == 2


def test_recurrent_states_and_odd_sizes(tmp_path: Path) -> None:
    write_checkpoint(TINY_MODELS["qwen2"], tmp_path / "m")
    with open_llm(tmp_path / "m", skip_tokenizer_init=True, max_model_len=128) as tiny:
        assert tiny.selfcheck().ok or not has_kernels()


def test_schemes_beside_each_other() -> None:
    found = LLM.compare(EMBEDDED_MODEL, [None, "w8a8", "w4a8"], TEXTS * 8, speed=False, max_model_len=256)
    plain, eight, four = found.rows
    assert plain.weight_bytes > eight.weight_bytes > four.weight_bytes
    assert plain.change == 0 and (plain.change_low, plain.change_high) == (0, 0)
    for row in found.rows:
        assert row.perplexity_low is not None and row.perplexity_high is not None
        assert row.perplexity_low < row.perplexity < row.perplexity_high and row.decode is None
    assert four.change_low is not None and four.change_high is not None
    assert four.change_low < four.change < four.change_high
    table = str(found)
    assert table.count("\n") == 3 and "w4a8" in table
    assert "w4a8" in Checker(found._repr_html_()).shown
    frame = found.to_pandas()
    assert list(frame["quantization"]) == ["none", "w8a8", "w4a8"] and len(frame.columns) == 10
    figure = found.plot()
    assert [text.get_text() for text in figure.axes[0].texts] == ["none", "w8a8", "w4a8"]
    with pytest.raises(ValidationError, match="schemes must be"):
        LLM.compare(EMBEDDED_MODEL, ["w3"], TEXTS)


def test_an_interval_holds_the_mean_of_other_texts() -> None:
    """Of 200 samples whose neighbours are alike, about 95% hold the true mean; ignoring that, far fewer would."""
    draw = random.Random(1)

    def sample(tokens: int = 640) -> tuple[float, ...]:
        values, last = [], draw.gauss(0, 1)
        for _ in range(tokens):
            last = 0.8 * last + 0.6 * draw.gauss(0, 1)  # of variance 1
            values.append(3 + last)
        return tuple(values)

    held, naive = 0, 0
    for _ in range(200):
        losses = sample()
        interval = perplexity_interval(TextScores(0.0, len(losses), (), losses))
        assert interval is not None
        held += math.log(interval[0]) < 3 < math.log(interval[1])
        mean, error = sum(losses) / len(losses), float(torch.tensor(losses).std()) / math.sqrt(len(losses))
        naive += abs(mean - 3) < 1.96 * error
    assert held >= 170 > naive + 20
    before, after = TextScores(0.0, 640, (), sample()), TextScores(0.0, 640, (), sample())
    assert change_interval(before, before) == (1.0, 1.0)
    assert change_interval(before, after) != (1.0, 1.0)
    assert perplexity_interval(TextScores(0.0, 100, (), before.losses[:100])) is None


def test_the_bars_of_transformers_are_off_meanwhile_and_then_as_before() -> None:
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    try:
        for switch in (logging.disable_progress_bar, logging.enable_progress_bar):
            switch()
            was_on = logging.is_progress_bar_enabled()
            with quiet():
                assert not logging.is_progress_bar_enabled()
            assert logging.is_progress_bar_enabled() == was_on
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
