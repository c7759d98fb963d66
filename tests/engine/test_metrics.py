"""`LLM(disable_log_stats=False)`: outputs say when their request was queued, computed and answered."""

from __future__ import annotations

import time

import pytest
from embedded import GREEDY, PROMPTS, open_llm, run, tokens

from llm import LLM, SamplingParams, ValidationError


def test_metrics_are_in_order_and_count_the_tokens() -> None:
    with open_llm(max_model_len=64, max_num_seqs=1, disable_log_stats=False) as llm:
        before = time.time()
        outputs = run(llm, PROMPTS)
        after = time.time()
        for output in outputs:
            metrics = output.metrics
            assert metrics is not None and metrics.num_preemptions == 0
            assert metrics.num_generation_tokens == len(output.outputs[0].token_ids)
            assert before <= metrics.arrival_time <= after
            assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts < metrics.last_token_ts
            assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
        first, second, _ = [output.metrics for output in outputs]
        # One row at a time: the second waits for the first.
        assert first is not None and second is not None and second.scheduled_ts >= first.last_token_ts
        with open_llm(max_model_len=64) as plain:
            unmeasured = run(plain, PROMPTS)
        assert tokens(unmeasured) == tokens(outputs) and [output.metrics for output in unmeasured] == [None] * 3


def test_metrics_of_several_completions_are_the_firsts() -> None:
    with open_llm(max_model_len=64, disable_log_stats=False) as llm:
        [output] = run(llm, PROMPTS[0], SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1))
        assert output.metrics is not None and output.metrics.num_generation_tokens == 5
        assert run(llm, PROMPTS[0], GREEDY)[0].metrics is not output.metrics


def test_it_is_a_flag() -> None:
    with pytest.raises(ValidationError, match="disable_log_stats must be True or False"):
        LLM(disable_log_stats="no")  # type: ignore[arg-type]
