"""Outputs say when their request was queued, computed and answered; `stats()` and `get_metrics()` count them."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from embedded import GREEDY, PROMPTS, open_llm, run
from tiny_models import tiny_checkpoint

from llm import LLM, LLMEngine, SamplingParams, ValidationError
from llm.config.engine import EMBEDDED_MODEL, LLMArgs
from llm.v1.metrics.reader import Counter, Gauge, Histogram, Metric


def test_metrics_are_in_order_and_count_the_tokens() -> None:
    with open_llm(max_model_len=64, max_num_seqs=1) as llm:
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
            assert metrics.queue_seconds <= metrics.first_token_latency < metrics.seconds
            decoding = metrics.last_token_ts - metrics.first_token_ts
            assert metrics.tokens_per_second == (metrics.num_generation_tokens - 1) / decoding
        first, second, _ = [output.metrics for output in outputs]
        # One row at a time: the second waits for the first.
        assert first is not None and second is not None and second.scheduled_ts >= first.last_token_ts
        assert outputs[0].metrics != outputs[1].metrics
        assert replace(outputs[0], metrics=outputs[1].metrics) == outputs[0]  # equal answers are equal
        assert "metrics" not in outputs[0].to_dict()  # and so are their files


def test_metrics_of_several_completions_are_the_firsts() -> None:
    with open_llm(max_model_len=64) as llm:
        [output] = run(llm, PROMPTS[0], SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1))
        assert output.metrics is not None and output.metrics.num_generation_tokens == 5
        assert run(llm, PROMPTS[0], GREEDY)[0].metrics is not output.metrics


def test_it_is_a_flag() -> None:
    with pytest.raises(ValidationError, match="disable_log_stats must be True or False"):
        LLMArgs(EMBEDDED_MODEL, disable_log_stats="no")  # type: ignore[arg-type]


def metrics_of(llm: LLM) -> dict[str, Metric]:
    """By name, with the reason of an end."""
    found = llm.get_metrics()
    assert {metric.labels["model_name"] for metric in found} == {llm.config.model_config.model}
    named = {metric.name + metric.labels.get("finished_reason", ""): metric for metric in found}
    assert len(named) == len(found)
    return named


def values_of(llm: LLM) -> dict[str, float]:
    return {
        name.removeprefix("vllm:"): metric.value
        for name, metric in metrics_of(llm).items()
        if isinstance(metric, Counter | Gauge)
    }


def named_buckets(named: dict[str, Metric]) -> dict[str, int]:
    histogram = named["vllm:request_generation_tokens"]
    assert isinstance(histogram, Histogram)
    return histogram.buckets


def test_the_counters_add_up_what_the_outputs_say() -> None:
    with open_llm(max_model_len=64) as llm:
        assert not any(values_of(llm).values())
        ended = run(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        again = run(llm, [PROMPTS[1] * 4] * 2, [SamplingParams(n=2, max_tokens=3, seed=1, ignore_eos=True)] * 2)
        completions = [item for output in (*ended, *again) for item in output.outputs]
        values = values_of(llm)
        assert values["generation_tokens"] == sum(len(item.token_ids) for item in completions) == 27
        prompts = [len(output.prompt_token_ids) for output in (*ended, *again) for _ in output.outputs]
        assert values["prompt_tokens"] == values["prefix_cache_queries"] == sum(prompts)
        assert 0 < values["prefix_cache_hits"] < values["prefix_cache_queries"]
        assert values["request_successlength"] == len(completions) == 7 and values["request_successstop"] == 0
        assert values["num_requests_running"] == values["num_requests_waiting"] == values["kv_cache_usage_perc"] == 0

        named = metrics_of(llm)
        # Answers of 5 tokens are within the bucket of that bound.
        answers = [len(item.token_ids) for item in completions]
        assert 5 in answers and {5.0, 10.0} < {float(bound) for bound in named_buckets(named)}
        for name, values_in in (("prompt", prompts), ("generation", answers)):
            lengths = named[f"vllm:request_{name}_tokens"]
            assert isinstance(lengths, Histogram) and (lengths.count, lengths.sum) == (7, sum(values_in))
            for bound, count in lengths.buckets.items():
                assert count == sum(length <= float(bound) for length in values_in)
        first, whole = named["vllm:time_to_first_token_seconds"], named["vllm:e2e_request_latency_seconds"]
        assert isinstance(first, Histogram) and isinstance(whole, Histogram) and 0 < first.sum < whole.sum
        assert first.count == whole.count == first.buckets["+Inf"] == 7


def test_a_suspended_stream_is_seen_and_a_dropped_one_is_counted() -> None:
    with open_llm(max_model_len=64) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        next(stream)
        values = values_of(llm)
        assert values["num_requests_running"] == 1 and 0 < values["kv_cache_usage_perc"] < 1
        assert values["request_successabort"] == values["prompt_tokens"] == 0
        stream.close()
        values = values_of(llm)
        assert values["num_requests_running"] == values["kv_cache_usage_perc"] == 0
        assert values["request_successabort"] == 1 and values["prompt_tokens"] > 0


def test_stats_say_what_the_outputs_say() -> None:
    with open_llm(max_model_len=64, num_threads=1) as llm:
        assert llm.stats().ended == {}
        held = sum(parameter.nbytes for parameter in parameters_of(llm))
        ended = run(llm, [PROMPTS[1] * 4] * 2, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        next(stream)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.ended) == (1, 0, {"length": 2})
        assert stats.prompt_tokens == sum(len(output.prompt_token_ids) for output in ended)
        assert stats.cached_tokens == sum(output.num_cached_tokens for output in ended) > 0
        assert stats.generated_tokens == 10 + stats.running and 0 < stats.kv_cache_used < 1
        assert stats.kv_cache_bytes == llm.config.cache_config.kv_cache_memory_bytes
        assert stats.weight_bytes == held
        assert json.loads(json.dumps(stats.to_dict()))["ended"] == {"length": 2}
        assert "ended              2 length" in str(stats)


@pytest.mark.parametrize(("family", "held"), [("mamba", 1 / 4), ("lfm2", 1 / 8)])
def test_the_cache_of_recurrent_layers_alone_is_its_slots(
    family: str, held: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A hybrid's is its blocks: 8 for 4 sequences of 32 tokens."""
    folder = tiny_checkpoint(family, tmp_path_factory)
    with LLM(folder, skip_tokenizer_init=True, max_model_len=32, max_num_seqs=4, speculative_config=None) as llm:
        assert llm.stats().kv_cache_used == values_of(llm)["kv_cache_usage_perc"] == 0
        engine = LLMEngine(llm)
        engine.add_request("one", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        assert llm.stats().kv_cache_used == values_of(llm)["kv_cache_usage_perc"] == held


def test_a_preempted_request_is_counted() -> None:
    """Two requests that both need more than the half of the blocks."""
    with open_llm(max_model_len=64, kv_cache_memory_bytes=5 * 32768, enable_prefix_caching=False) as tight:
        outputs = run(tight, [[5] * 10, [6] * 10], SamplingParams(temperature=0, max_tokens=44, ignore_eos=True))
        preempted = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
        assert tight.stats().preemptions == sum(preempted) > 0


def parameters_of(llm: LLM) -> list[torch.Tensor]:
    [found] = llm.apply_model(lambda model: list(model.parameters()))
    return found
