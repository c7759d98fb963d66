"""The built-in processors against references of a few logit rows: penalties, bias, allowed tokens, bad words, min_p."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.config import SchedulerConfig
from llm.sampling.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality
from llm.sampling.logits_processors import builtin as penalties
from llm.sampling.logits_processors.builtin import (
    AllowedTokensLogitsProcessor,
    BadWordsLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    PenaltiesLogitsProcessor,
)
from llm.sampling_params import SamplingParams

VOCAB = 23
ROWS = 4


def make(kind: type[LogitsProcessor]) -> LogitsProcessor:
    config: Any = SchedulerConfig(ROWS, 64)
    return kind(config, torch.device("cpu"), False)


def penalised(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The definition, token by token, in float32 as the engine computes."""
    result = logits.astype(np.float32).copy()
    for token in set(prompt) | set(output):
        value, penalty = result[token], np.float32(params.repetition_penalty)
        value = value / penalty if value > 0 else value * penalty
        count = np.float32(Counter(output)[token])
        value = value - np.float32(params.frequency_penalty) * count
        result[token] = value - np.float32(params.presence_penalty) * np.float32(count > 0)
    return result


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.5, 1.3, 5.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -1.5, 0.3]),
    }
)
ROW = st.tuples(PENALTIES, TOKENS, TOKENS, TOKENS)


def run_penalties(rows: list[Any], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two steps, rows 0 and 1 swapped between them: (ours, the definition's) for each row and step."""
    processor = make(PenaltiesLogitsProcessor)
    params = [SamplingParams(**own) for own, *_ in rows]
    outputs = [list(output) for _, _, output, _ in rows]
    order = list(range(len(rows)))
    pairs = []
    added = [(row, params[row], rows[row][1], outputs[row]) for row in order]
    update: BatchUpdate | None = BatchUpdate(len(rows), [], added, [])
    for step in range(2):
        processor.update_state(update)
        logits = np.random.default_rng(seed + step).integers(-8, 8, (len(rows), VOCAB)).astype(np.float32) / 2
        logits[:, 5] = -math.inf
        ours = logits if processor.is_idle() else processor.apply(torch.from_numpy(logits.copy())).numpy()
        for logit_row, row in enumerate(order):
            pairs.append((ours[logit_row], penalised(logits[logit_row], params[row], rows[row][1], outputs[row])))
            outputs[row] += rows[row][3]
        order[0], order[1] = order[1], order[0]
        update = BatchUpdate(len(rows), [], [], [(0, 1, MoveDirectionality.SWAP)])
    return pairs


@given(rows=st.lists(ROW, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 999))
@settings(max_examples=80)
def test_penalties_are_those_of_the_definition(rows: list[Any], seed: int) -> None:
    for ours, definition in run_penalties(rows, seed):
        np.testing.assert_array_equal(ours, definition)


def test_penalties_of_a_long_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """More distinct tokens than there was room for at first."""
    rows = [({"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}, [1], [], [])] * 2
    output = list(range(200)) * 2
    processor = make(PenaltiesLogitsProcessor)
    processor.update_state(BatchUpdate(1, [], [(0, SamplingParams(**rows[0][0]), [1], output)], []))
    logits = np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32)
    expected = penalised(logits[0], SamplingParams(**rows[0][0]), [1], output)
    np.testing.assert_array_equal(processor.apply(torch.from_numpy(logits)).numpy()[0], expected)


def counts_the_prompt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = penalties._Seen.__init__

    def planted(self: Any, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
        original(self, params, prompt, output)
        self.counts[: self.size] += 1.0

    monkeypatch.setattr(penalties._Seen, "__init__", planted)


def divides_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties.torch, "where", lambda chosen, first, second: first)


@pytest.mark.parametrize("plant", [counts_the_prompt_too, divides_all_logits])
def test_planted_defects_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [({"repetition_penalty": 1.3, "frequency_penalty": 0.5}, list(range(12)), [3, 3], [4])] * ROWS
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for ours, definition in run_penalties(rows, 0):
            np.testing.assert_array_equal(ours, definition)


def test_rows_without_penalties_cost_nothing() -> None:
    for kind in (
        PenaltiesLogitsProcessor,
        AllowedTokensLogitsProcessor,
        BadWordsLogitsProcessor,
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    ):
        processor = make(kind)
        processor.update_state(BatchUpdate(1, [], [(0, SamplingParams(), [1], [2])], []))
        assert processor.is_idle()


def apply_to(kind: type[LogitsProcessor], logits: torch.Tensor, params: dict[int, SamplingParams]) -> torch.Tensor:
    """`params`: row -> its params; the others have defaults."""
    processor = make(kind)
    added = [(row, params.get(row, SamplingParams()), [1], [2, 3]) for row in range(len(logits))]
    processor.update_state(BatchUpdate(len(logits), [], added, []))
    return processor.apply(logits.clone())


LOGITS = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32))


def test_allowed_tokens_and_bias() -> None:
    allowed = apply_to(
        AllowedTokensLogitsProcessor,
        LOGITS,
        {1: SamplingParams(allowed_token_ids=[3, 7]), 3: SamplingParams(allowed_token_ids=[0])},
    )
    expected = LOGITS.clone()
    expected[1] = expected[3] = -math.inf
    expected[1, [3, 7]], expected[3, 0] = LOGITS[1, [3, 7]], LOGITS[3, 0]
    assert torch.equal(allowed, expected)
    bias = {2: SamplingParams(logit_bias={4: 1.5, 9: -math.inf}), 0: SamplingParams(logit_bias={4: -2.0})}
    expected = LOGITS.clone()
    expected[2, 4] += 1.5
    expected[2, 9] = -math.inf
    expected[0, 4] -= 2.0
    assert torch.equal(apply_to(LogitBiasLogitsProcessor, LOGITS, bias), expected)


def test_bad_words_bar_the_token_that_would_complete_one() -> None:
    params = SamplingParams(bad_words=["x"])
    # The output is [2, 3].
    params.bad_words_token_ids = [[5], [3, 6], [2, 3, 7], [2, 8], [1, 2, 3, 9]]
    barred = apply_to(BadWordsLogitsProcessor, LOGITS, {2: params})
    expected = LOGITS.clone()
    expected[2, [5, 6, 7]] = -math.inf
    assert torch.equal(barred, expected)


def test_min_p_keeps_what_is_likely_enough() -> None:
    params = {0: SamplingParams(min_p=0.3), 1: SamplingParams(min_p=1.0), 2: SamplingParams(min_p=0.3, temperature=0)}
    kept = apply_to(MinPLogitsProcessor, LOGITS, params)
    for row, min_p in ((0, 0.3), (1, 1.0), (2, 0.0), (3, 0.0)):
        probabilities = LOGITS[row].double().softmax(-1)
        assert torch.equal(kept[row] > -math.inf, probabilities >= min_p * probabilities.max() * (1 - 1e-7))
    assert torch.equal(kept.isinf() | (kept == LOGITS), torch.ones_like(kept, dtype=torch.bool))


def test_min_tokens_lets_go_when_enough_are_out() -> None:
    processor = make(MinTokensLogitsProcessor)
    params, output = SamplingParams(min_tokens=2), [3]
    params.all_stop_token_ids = frozenset({0, 4, VOCAB + 5})
    processor.update_state(BatchUpdate(2, [], [(0, SamplingParams(), [1], []), (1, params, [1], output)], []))
    assert (processor.apply(LOGITS[:2].clone()) == -math.inf).nonzero().tolist() == [[1, 0], [1, 4]]
    output.append(3)
    processor.update_state(None)
    assert processor.is_idle()
