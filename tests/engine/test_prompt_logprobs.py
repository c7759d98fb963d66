"""Prompt logprobs: the log-softmax of the model's own logits, however the prompt was computed.

Whole, in chunks, after a prefix hit of someone else's, after preemption in the middle: the same numbers. The reference
is the model called directly on the whole prompt.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from embedded import assert_idle, engine_of, open_llm, run
from kernel_sets import has_kernels

from llm import LLM, BeamSearchParams, RequestOutput, SamplingParams, ValidationError
from llm.jobs.journal import output_from_json
from llm.outputs import FlatLogprobs, Logprob
from llm.runner import model_runner

PROMPTS = [[5, 300, 301, 17, 1200, 9, 44, 45, 46, 300, 301, 2], [7, 8], [9], list(range(100, 141))]
WANTED = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, ignore_eos=True)
# Where no kernels can be compiled PyTorch computes, and rounds differently with the number of rows.
TOLERANCE = 0.0 if has_kernels() else 1e-4
RANKS = 0 if has_kernels() else 1
# A bf16 cache would turn a rounding difference into one of a whole bf16 step.
EXACT: dict[str, Any] = {"kv_cache_dtype": "float32"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(block_size=4, **EXACT) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(llm: LLM) -> list[RequestOutput]:
    return run(llm, PROMPTS, WANTED)


def sampled_logprobs(llm: LLM, prompt: list[int]) -> np.ndarray:
    """[len(prompt) - 1, vocab]: the next token's logprobs after every proper prefix, one request each."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, ignore_eos=True)
    outputs = run(llm, [prompt[:end] for end in range(1, len(prompt))], params)
    vocab = llm.config.model_config.vocab_size
    table = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    return np.array([[position[token].logprob for token in range(vocab)] for position in table])


def check(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert output.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert output.prompt_logprobs[0] is other.prompt_logprobs[0] is None
        for ours, theirs in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert list(ours) == list(theirs)
            for token, item in ours.items():
                assert abs(item.logprob - theirs[token].logprob) <= TOLERANCE
                assert abs(item.rank - theirs[token].rank) <= RANKS


@pytest.mark.parametrize("row", [0, 3])
def test_they_are_what_the_model_says_of_each_prefix(row: int, llm: LLM, whole: list[RequestOutput]) -> None:
    prompt, found = PROMPTS[row], whole[row].prompt_logprobs
    assert found is not None
    for expected, token, position in zip(sampled_logprobs(llm, prompt), prompt[1:], found[1:], strict=True):
        assert position is not None
        assert abs(position[token].logprob - expected[token]) <= TOLERANCE
        assert abs(position[token].rank - int((expected >= expected[token]).sum())) <= RANKS
        top = [item.logprob for item in position.values() if item.rank is not None and item.rank <= 2]
        assert np.abs(np.sort(expected)[::-1][: len(top)] - top).max() <= TOLERANCE
        assert next(iter(position)) == token and 2 <= len(position) <= 3
        text = engine_of(llm).tokenizer.decode([token], False)
        assert position[token].decoded_token == text or text.endswith("\ufffd")


def test_a_prompt_of_one_token_has_none_to_report(whole: list[RequestOutput]) -> None:
    assert [len(output.prompt_logprobs or []) for output in whole] == [12, 2, 1, 41]
    assert whole[2].prompt_logprobs == [None]


@pytest.mark.parametrize(
    "setting",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 5, "block_size": 4},
        {"max_num_batched_tokens": 7, "max_num_seqs": 2, "enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "max_model_len": 64},
    ],
    ids=str,
)
def test_chunks_make_no_difference(setting: dict[str, Any], whole: list[RequestOutput]) -> None:
    with open_llm(**EXACT, **setting) as chunked:
        check(run(chunked, PROMPTS, WANTED), whole)
        check(run(chunked, PROMPTS[::-1], WANTED)[::-1], whole)
        assert_idle(chunked)


def test_a_cached_prefix_is_computed_again_and_can_be_read_by_others(llm: LLM, whole: list[RequestOutput]) -> None:
    again = run(llm, PROMPTS, WANTED)
    check(again, whole)
    assert [output.num_cached_tokens for output in again] == [0, 0, 0, 0]
    reader = run(llm, PROMPTS[3], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))[0]
    assert reader.num_cached_tokens == 40 and reader.prompt_logprobs is None
    skipped = run(llm, PROMPTS[3], SamplingParams(max_tokens=1, skip_reading_prefix_cache=True))[0]
    assert skipped.num_cached_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_loses_and_repeats_nothing(caching: bool, llm: LLM, whole: list[RequestOutput]) -> None:
    cache = llm.config.cache_config
    per_token = cache.kv_cache_memory_bytes // cache.num_blocks // cache.block_size
    tight = {"max_model_len": 56, "block_size": 4, "kv_cache_memory_bytes": 60 * per_token}
    longer = SamplingParams(max_tokens=15, temperature=0, prompt_logprobs=2, ignore_eos=True)
    prompts = [PROMPTS[3], PROMPTS[0], PROMPTS[0][1:], PROMPTS[3][2:]]
    expected = run(llm, prompts, longer)
    with open_llm(max_num_batched_tokens=6, enable_prefix_caching=caching, **EXACT, **tight) as preempting:
        check(run(preempting, prompts, longer), expected)
        assert engine_of(preempting).scheduler.num_preemptions > 0
        assert_idle(preempting)


def test_siblings_share_the_prompt_and_its_logprobs(llm: LLM, whole: list[RequestOutput]) -> None:
    params = SamplingParams(n=3, max_tokens=3, prompt_logprobs=2, seed=1, ignore_eos=True)
    before = engine_of(llm).stats.tokens
    output = run(llm, PROMPTS[3], params)[0]
    assert engine_of(llm).stats.tokens - before < 2 * 41 + 9
    output.outputs[0].token_ids = whole[3].outputs[0].token_ids
    check([output], [whole[3]])


def test_logits_are_computed_under_the_cap(
    llm: LLM, whole: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine_of(llm).runner
    sizes: list[int] = []
    compute = runner.model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(runner, "_logit_rows_at_once", 3)
    monkeypatch.setattr(runner.model, "compute_logits", watched)
    check(run(llm, PROMPTS, WANTED), whole)
    # Every prompt token but the last of each prompt, and one line per drawn token, and nothing else.
    assert max(sizes) == 3 and sum(sizes) == sum(len(prompt) - 1 for prompt in PROMPTS) + 4 * 3
    assert model_runner._LOGITS_BYTES <= 64 << 20


def test_rows_that_want_other_numbers_are_scored_in_one_chunk(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of lines is of several rows, and each has as many as it asked for, its own."""
    wanted = [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=count) for count in (0, 3, 1, 2)]
    alone = [run(llm, [prompt], own)[0] for prompt, own in zip(PROMPTS, wanted, strict=True)]
    monkeypatch.setattr(engine_of(llm).runner, "_logit_rows_at_once", 3)
    together = run(llm, PROMPTS, wanted)
    check(together, alone)
    for output, own in zip(together, wanted, strict=True):
        count = own.prompt_logprobs or 0
        assert all(max(1, count) <= len(position or ()) <= count + 1 for position in (output.prompt_logprobs or [])[1:])


def test_the_rank_of_a_token_counts_all_that_are_as_likely() -> None:
    """Of equal ones the sampled token has the rank of the last, though its place among the likeliest is another."""
    with open_llm(logprobs_mode="processed_logprobs", max_model_len=64) as equal:
        count = equal.config.model_config.vocab_size
        params = SamplingParams(max_tokens=3, temperature=0, logprobs=4, ignore_eos=True)
        params.logits_processors = [lambda tokens, logits: torch.zeros_like(logits)]
        (output,) = run(equal, PROMPTS[:1], params)
        for position, token in zip(output.outputs[0].logprobs or (), output.outputs[0].token_ids, strict=True):
            assert position[token].rank == count
            assert {item.rank for other, item in position.items() if other != token} < {1, 2, 3, 4}


def test_a_lost_position_is_seen(llm: LLM, whole: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: each logprob reported of the token one place on."""
    sampler = engine_of(llm).runner.sampler
    gather = sampler.gather_logprobs

    def planted(logits: torch.Tensor, tokens: torch.Tensor, *rest: Any) -> Any:
        return gather(logits, tokens.roll(1), *rest)

    monkeypatch.setattr(sampler, "gather_logprobs", planted)
    with pytest.raises(AssertionError):
        check(run(llm, PROMPTS, WANTED), whole)


def test_flat_logprobs_say_the_same(llm: LLM) -> None:
    own = {"max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "logprobs": 3, "ignore_eos": True}
    [nested, flat] = run(llm, [PROMPTS[0]] * 2, [SamplingParams(**own), SamplingParams(flat_logprobs=True, **own)])
    of_output, of_prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(of_output, FlatLogprobs) and isinstance(of_prompt, FlatLogprobs)
    assert list(of_output) == nested.outputs[0].logprobs
    assert of_prompt[0] == {} and list(of_prompt)[1:] == (nested.prompt_logprobs or [])[1:]
    assert of_output[-1] == of_output[3] and list(of_output[1:3]) == list(of_output)[1:3]
    assert len(of_output) == 4 and len(of_output.token_ids) == of_output.end_indices[-1]
    with pytest.raises(IndexError):
        of_output[4]


def test_max_logprobs_caps_them_too() -> None:
    with open_llm(max_logprobs=3) as capped:
        for count in (4, -1):
            with pytest.raises(ValidationError, match="prompt_logprobs must be at most max_logprobs"):
                run(capped, PROMPTS[1], SamplingParams(prompt_logprobs=count))
        assert run(capped, PROMPTS[1], SamplingParams(prompt_logprobs=3, max_tokens=1))[0].prompt_logprobs is not None
        with pytest.raises(ValidationError, match="beam_width must be at most 1: a step asks for 2"):
            capped.beam_search(PROMPTS[1], BeamSearchParams(2, 2))
        assert len(capped.beam_search(PROMPTS[1], BeamSearchParams(1, 2))[0].sequences) == 1


def test_flat_logprobs_are_appended_to_as_vllms() -> None:
    one, two = {3: Logprob(-0.5, 1, "a")}, {4: Logprob(-1.0, 2, "b"), 5: Logprob(-2.0, 3, None)}
    whole, fast = FlatLogprobs(), FlatLogprobs()
    whole.extend([one, None, two])
    fast.append_fast([3], [-0.5], [1], ["a"])
    fast.append_fast([], [], [], [])
    fast.append_fast([4, 5], [-1.0, -2.0], itertools.chain([2], [3]), ["b", None])
    assert whole == fast and list(fast) == [one, {}, two] and fast[-1] == two and list(fast[1:]) == [{}, two]
    for change in (lambda: fast.insert(0, one), lambda: fast.__setitem__(0, one), lambda: fast.__delitem__(0)):
        with pytest.raises(TypeError, match="FlatLogprobs"):
            change()
    assert list(reversed(fast)) == [two, {}, one] and len(fast) == 3


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 6}, {"max_num_seqs": 1}], ids=str)
def test_candidates_are_scored_at_each_prompt_token(options: dict[str, Any], whole: list[RequestOutput]) -> None:
    """As `prompt_logprobs` scores them, in chunks, beside other rows and with `prompt_logprobs` of its own."""
    prompt, start = PROMPTS[0], 4
    asked = [[token, 7, (token * 31) % 2000] for token in prompt[start + 1 :]]
    asked[1] = asked[1][:1]  # padded with -1
    asked[2][1] = -1
    params = [
        SamplingParams(max_tokens=3, temperature=0, prompt_logprob_token_ids=asked, prompt_logprob_start=start),
        WANTED,
        SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprob_token_ids=[[3]] * (len(prompt) - 1), n=2),
        WANTED,
    ]
    with open_llm(block_size=4, **EXACT, **options) as llm:
        outputs = run(llm, [prompt, PROMPTS[3], prompt, PROMPTS[1]], params)
        table = sampled_logprobs(llm, prompt)
    scores = outputs[0].prompt_token_id_logprobs
    assert scores is not None and scores.dtype == np.float32 and scores.shape == (len(prompt) - 1 - start, 3)
    for row, ids in enumerate(asked):
        for column, token in enumerate([*ids, -1, -1][:3]):
            expected = table[start + row, token] if token >= 0 else -np.inf
            assert scores[row, column] == pytest.approx(expected, abs=TOLERANCE)
    assert outputs[0].prompt_logprobs is None and outputs[1].prompt_token_id_logprobs is None
    both = outputs[2]
    assert both.prompt_logprobs is not None and len(both.prompt_logprobs) == len(prompt)
    assert both.prompt_token_id_logprobs == pytest.approx(table[:, 3:4], abs=TOLERANCE)
    check(outputs[1::2], [whole[3], whole[1]])
    back = output_from_json(json.loads(json.dumps(outputs[0].to_dict())), None)
    assert np.array_equal(back.prompt_token_id_logprobs, scores) and outputs[0].to_dict() != outputs[1].to_dict()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt_logprob_token_ids": [[1]] * 3}, "has 3 rows and must have 1: one for each of the prompt's 2 tokens"),
        ({"prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 1}, "has 1 rows and must have 0"),
        ({"prompt_logprob_token_ids": [[99999]]}, "prompt_logprob_token_ids must be below the vocabulary size"),
    ],
)
def test_candidates_that_do_not_fit_the_prompt_are_refused(llm: LLM, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        run(llm, [PROMPTS[1]], SamplingParams(**given))
