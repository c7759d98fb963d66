"""What a request asks beyond drawing: its effective parameters, truncation, endings, words it may not say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import PROMPTS, assert_idle, copy_model, open_llm, run, tokens

from llm import LLM, SamplingParams, ValidationError
from llm.engine.request import repeats
from llm.sampling_params import RepetitionDetectionParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64) as opened:
        yield opened


def test_output_params_are_what_was_in_effect_and_where_it_came_from(llm: LLM) -> None:
    given = SamplingParams(temperature=0.7, top_k=9, max_tokens=500)
    bare, own = run(llm, PROMPTS[:2], [SamplingParams(seed=4), given])
    room = 64 - len(bare.prompt_token_ids)
    assert bare.params is not None and own.params is not None
    assert (bare.params.max_tokens, bare.params.seed) == (room, 4)
    assert bare.params.origins["max_tokens"] == "what the prompt leaves of max_model_len"
    assert bare.params.origins["seed"] == "given" and bare.params.origins["temperature"] == "default"
    assert own.params.max_tokens == 64 - len(own.prompt_token_ids)
    assert own.params.origins["max_tokens"] == "given as 500; the prompt leaves no more of max_model_len"
    assert own.params.seed == own.seed and "derived from the engine's seed 0" in own.params.origins["seed"]
    assert "top_k                    9  (given)" in str(own.params)
    assert given == SamplingParams(temperature=0.7, top_k=9, max_tokens=500)  # the caller's object


def test_a_row_is_replayed_with_the_params_of_its_output(llm: LLM) -> None:
    outputs = run(llm, PROMPTS, SamplingParams(n=2, temperature=1.2, max_tokens=10))
    for output in outputs:
        again = run(llm, output.prompt, output.params)[0]
        assert [item.token_ids for item in again.outputs] == [item.token_ids for item in output.outputs]


def test_generation_config_supplies_every_default_we_know_and_only_without_params(tmp_path: Path) -> None:
    defaults = {"repetition_penalty": 1.3, "temperature": 0.0, "top_k": 7, "top_p": 0.5, "min_p": 0.1}
    folder = copy_model(tmp_path / "model", generation_config={**defaults, "max_new_tokens": 9})
    with open_llm(folder, max_model_len=64) as configured:
        output = configured.generate(PROMPTS[0], use_tqdm=False)[0]
        params = output.params
        assert params is not None and params.max_tokens == 9
        for name, value in defaults.items():
            assert (getattr(params, name), params.origins[name]) == (value, "generation_config.json")
        spelled_out = SamplingParams(max_tokens=9, **defaults)
        assert tokens([output]) == tokens(run(configured, PROMPTS[0], spelled_out))
        without = SamplingParams(max_tokens=9, **{**defaults, "repetition_penalty": 1.0})
        assert tokens([output]) != tokens(run(configured, PROMPTS[0], without))
        neutral = run(configured, PROMPTS[0], SamplingParams(max_tokens=1))[0].params
        assert neutral is not None and neutral.repetition_penalty == neutral.temperature == 1.0
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 4]


@pytest.mark.parametrize(("keep", "length"), [(None, 20), (5, 5), (20, 20), (99, 20), (-1, 20)])
def test_prompts_are_cut_to_their_last_tokens_when_asked(keep: int | None, length: int, llm: LLM) -> None:
    prompt = list(range(100, 120))
    params = SamplingParams(temperature=0, max_tokens=3, truncate_prompt_tokens=keep)
    output = run(llm, prompt, params)[0]
    assert output.prompt_token_ids == prompt[-length:]
    assert tokens([output]) == tokens(run(llm, prompt[-length:], SamplingParams(temperature=0, max_tokens=3)))


def test_a_prompt_that_is_too_long_keeps_what_leaves_room(llm: LLM) -> None:
    prompt = list(range(100, 200))
    with pytest.raises(ValidationError, match="the prompt has 100 tokens"):
        run(llm, prompt, SamplingParams(max_tokens=3))
    with pytest.raises(ValidationError, match="the prompt has 64 tokens"):
        run(llm, prompt[:64], SamplingParams(max_tokens=3))
    assert len(run(llm, prompt[:63], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 1
    for max_tokens, length in ((3, 61), (None, 63), (64, 1)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, truncate_prompt_tokens=-1, ignore_eos=True)
        output = run(llm, prompt, params)[0]
        assert output.prompt_token_ids == prompt[-length:]
        assert len(output.outputs[0].token_ids) == 64 - length


def test_bad_words_do_not_appear_in_any_spelling(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    text = run(llm, PROMPTS[0], SamplingParams(**params))[0].outputs[0].text
    word = text.split()[2]
    assert word in text
    barred = run(llm, PROMPTS[0], SamplingParams(bad_words=[word, "of"], **params))[0].outputs[0].text
    assert word not in barred.split() and "of" not in barred.split()
    with open_llm(skip_tokenizer_init=True) as bare, pytest.raises(ValidationError, match="bad_words"):
        run(bare, [5], SamplingParams(bad_words=["x"]))


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"allowed_token_ids": [1, 2304]}, "allowed_token_ids"),
        ({"logit_bias": {2304: 1.0}}, "logit_bias"),
        ({"logprob_token_ids": [2304]}, "logprob_token_ids"),
        ({"stop_token_ids": [2304]}, "stop_token_ids"),
        ({"min_tokens": 64}, "min_tokens"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_before_any_work(
    fields: dict[str, Any], parameter: str, llm: LLM
) -> None:
    with pytest.raises(ValidationError, match=f"prompt 2: {parameter} must be ") as caught:
        run(llm, PROMPTS, [SamplingParams(), SamplingParams(), SamplingParams(**fields)])
    assert caught.value.parameter == parameter
    assert_idle(llm)


@pytest.mark.parametrize(
    ("output", "rule", "expected"),
    [
        ([1, 2, 2, 2], (1, 1, 3), True),
        ([2, 2], (1, 1, 3), False),
        ([9, 1, 2, 1, 2], (2, 2, 2), True),
        ([9, 1, 2, 1, 2], (1, 0, 2), False),
        ([1, 2, 3, 1, 2, 3], (4, 0, 2), True),
        ([1, 2, 3, 1, 2, 3, 4], (4, 0, 2), False),
        ([1, 1], (0, 0, 0), False),
    ],
)
def test_repetition_is_a_pattern_at_the_end(output: list[int], rule: tuple[int, int, int], expected: bool) -> None:
    assert repeats(output, RepetitionDetectionParams(*rule)) is expected


def test_a_request_that_repeats_itself_ends(llm: LLM) -> None:
    pattern = [300, 301, 302]

    def repeat(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[pattern[len(output_ids) % 3] if len(output_ids) > 1 else len(output_ids)] = 0.0
        return forced

    rule = RepetitionDetectionParams(max_pattern_size=5, min_pattern_size=2, min_count=3)
    own = {"logits_processors": [repeat], "ignore_eos": True, "max_tokens": 40, "repetition_detection": rule}
    [ended, later, free] = run(
        llm,
        # The prompt's own repetition does not count.
        [pattern * 5] * 3,
        [SamplingParams(**own), SamplingParams(min_tokens=20, **own), SamplingParams(max_tokens=15, ignore_eos=True)],
    )
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("repetition", None)
    assert ended.outputs[0].token_ids == [0, 1, 302, *[300, 301, 302] * 2, 300, 301]
    assert (later.outputs[0].finish_reason, len(later.outputs[0].token_ids)) == ("repetition", 20)
    assert free.outputs[0].finish_reason == "length"
    assert_idle(llm)


FIXED = torch.sin(torch.arange(2304.0) * 1.7) * 3.0
SEEDED = [
    {"seed": 3, "temperature": 1.0},
    {"seed": 3, "temperature": 0.6, "top_p": 0.9, "n": 3},
    {"seed": 4, "temperature": 1.3, "top_k": 30},
    {"seed": 5, "temperature": 1.0, "min_p": 0.2, "frequency_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"seed": 2**64 - 1, "top_p": 0.5, "top_k": 900},
] * 2


def seeded(llm: LLM, order: list[int]) -> dict[int, list[list[int]]]:
    """On the same logits at every position, so that nothing but the draws can differ: row -> its completions."""
    own = [
        SamplingParams(max_tokens=9 + index % 4, ignore_eos=True, logits_processors=[lambda out, row: FIXED], **fields)
        for index, fields in enumerate(SEEDED)
    ]
    outputs = run(llm, [[5 + index] * (3 + index) for index in order], [own[index] for index in order])
    return {index: [item.token_ids for item in output.outputs] for index, output in zip(order, outputs, strict=True)}


def test_seeded_draws_on_fixed_logits_are_the_same_in_every_batch() -> None:
    """Alone, batched, reordered, in chunks, preempted, one of several completions: bit for bit."""
    rows = list(range(len(SEEDED)))
    with open_llm() as roomy:
        alone = {index: seeded(roomy, [index])[index] for index in rows}
        cache = roomy.config.cache_config
        per_token = cache.kv_cache_memory_bytes // cache.num_blocks // cache.block_size
        for order in (rows, rows[::-1], rows[::2] + rows[1::2]):
            assert seeded(roomy, order) == alone
    assert all(len(set(map(tuple, alone[index]))) == 3 for index in (1, 7))
    tight = {"max_model_len": 40, "block_size": 4, "kv_cache_memory_bytes": 48 * per_token, "max_num_seqs": 5}
    for setting in ({"max_num_batched_tokens": 2}, tight):
        with open_llm(**setting) as other:
            assert seeded(other, rows) == alone
            assert (setting is tight) == (other._engine.scheduler.num_preemptions > 0)  # type: ignore[union-attr]


def test_logits_in_chunks_of_rows_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no processor at work the logits of many rows are computed a few rows at a time."""
    prompts = [[5 + index] * (3 + index) for index in range(8)]
    own = [SamplingParams(max_tokens=6, temperature=index % 2, seed=index, logprobs=2) for index in range(8)]
    answers = []
    for size in (10**6, 3, 1):
        with open_llm(kv_cache_dtype="float32") as chunked:
            monkeypatch.setattr(chunked._engine.runner, "_logit_rows_at_once", size)  # type: ignore[union-attr]
            outputs = run(chunked, prompts, own)
        answers.append([(output.outputs[0].token_ids, len(output.outputs[0].logprobs or [])) for output in outputs])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_logprobs_mode_of_the_engine(mode: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, logit_bias={300: 50.0}, prompt_logprobs=0)
    raw = run(llm, PROMPTS[0], params)[0]
    with open_llm(max_model_len=64, logprobs_mode=mode) as other:
        output = run(other, PROMPTS[0], params)[0]
    assert output.outputs[0].token_ids == raw.outputs[0].token_ids == [300, 300]
    [first, _], [own, _] = raw.outputs[0].logprobs, output.outputs[0].logprobs  # type: ignore[misc]
    if mode == "processed_logprobs":
        assert first[300].logprob < -1.0 and own[300].logprob > -0.1
        assert output.prompt_logprobs == raw.prompt_logprobs  # there is nothing to process a prompt by
    else:
        last = max(first, key=lambda token: first[token].logprob)
        assert own[last].logprob - own[300].logprob == pytest.approx(first[last].logprob - first[300].logprob, abs=1e-4)
        assert own[last].logprob != pytest.approx(first[last].logprob, abs=1e-3)
    with pytest.raises(ValidationError, match="logprobs_mode must be 'raw_logprobs' or"):
        LLM(logprobs_mode="raw")


def test_a_character_of_several_tokens_is_decoded_where_it_is_complete(llm: LLM) -> None:
    word = "caf\u00e9 \u65e5\u672c"
    ids = llm.get_tokenizer().encode(word, add_special_tokens=False)

    def spell(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[ids[len(output_ids)]] = 0.0
        return forced

    params = SamplingParams(
        max_tokens=len(ids), logprobs=0, prompt_logprobs=0, logits_processors=[spell], ignore_eos=True
    )
    output = run(llm, [1, *ids], params)[0]
    assert output.outputs[0].text == word and len(ids) > len(word)
    for positions in (output.outputs[0].logprobs, output.prompt_logprobs[1:]):  # type: ignore[index]
        texts = [position[token].decoded_token for position, token in zip(positions, ids, strict=True)]  # type: ignore
        assert "".join(texts) == word and "" in texts  # type: ignore[arg-type]
