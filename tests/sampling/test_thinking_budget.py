"""`thinking_token_budget`: reasoning ends after so many tokens, wherever it began, and however requests are batched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from embedded import assert_idle, open_llm, run, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from llm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from llm.config import ReasoningConfig
from llm.sampling.logits_processors.builtin import Section

START_TEXT, END_TEXT = " the LORD", " Amen. And"
REASONING = {"reasoning_start_str": START_TEXT, "reasoning_end_str": END_TEXT}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
FIRST = [5, 300, 7]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(reasoning_config=REASONING, max_num_seqs=6, max_num_batched_tokens=7) as opened:
        yield opened
        assert_idle(opened)


def ids_of(llm: LLM, text: str) -> list[int]:
    tokenizer = llm._preprocessor.tokenizer
    assert tokenizer is not None
    return tokenizer.encode_rendered([text])[0]


@pytest.fixture(scope="module")
def start(llm: LLM) -> list[int]:
    return ids_of(llm, START_TEXT)


@pytest.fixture(scope="module")
def end(llm: LLM) -> list[int]:
    found = ids_of(llm, END_TEXT)
    assert len(found) > 1  # the harder case
    return found


def saying(ids: list[int], place: int = 0) -> Any:
    """A processor that makes these ids the output's, from `place` on."""

    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        index = len(output_ids) - place
        if not 0 <= index < len(ids):
            return logits
        only = torch.full_like(logits, -torch.inf)
        only[ids[index]] = 0.0
        return only

    return processor


def answer(llm: LLM, prompt: list[int], budget: int | None, **fields: Any) -> list[int]:
    return tokens(run(llm, prompt, SamplingParams(**{**GREEDY, "thinking_token_budget": budget, **fields})))[0]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0, 1])
def test_reasoning_that_a_prompt_began_ends_after_the_budget(
    llm: LLM, start: list[int], end: list[int], budget: int, temperature: int
) -> None:
    fields = {"temperature": temperature, "seed": 4, "logprobs": 1}
    free = answer(llm, FIRST + start, None, **fields)
    assert answer(llm, FIRST + start, -1, **fields) == free
    # A processor that bars the end does not stop it.
    fields["logit_bias"] = {token: -float("inf") for token in end if token not in free[:budget]}
    kept = answer(llm, FIRST + start, budget, **fields)
    assert kept[:budget] == free[:budget] and kept[budget : budget + len(end)] == end and free != kept


def test_what_the_prompt_reasoned_counts(llm: LLM, start: list[int], end: list[int]) -> None:
    assert answer(llm, [*start, 5, 300], 3)[1 : 1 + len(end)] == end
    assert answer(llm, [*start, 5, 300, 7, 8], 3)[: len(end)] == end
    # The last start counts, and none that has an end.
    assert answer(llm, [*start, 5, 300, 7, 8, *start], 3)[3 : 3 + len(end)] == end
    closed = [*start, 5, *end, 300]
    assert answer(llm, closed, 1) == answer(llm, closed, None)


def test_reasoning_that_the_output_began_ends_after_the_budget(llm: LLM, start: list[int], end: list[int]) -> None:
    spoken = [9, *start, 20, *start, 21]  # the second start is text of the section
    kept = answer(llm, FIRST, 2, logits_processors=[saying(spoken)])
    opened = 1 + len(start)
    assert kept[: opened + 2] == [*spoken, *kept][: opened + 2] and kept[opened + 2 : opened + 2 + len(end)] == end


def test_reasoning_that_ends_by_itself_is_left_alone_and_the_next_has_its_own_budget(
    llm: LLM, start: list[int], end: list[int]
) -> None:
    spoken = [*start, 20, *end, 21, *start]
    fields: dict[str, Any] = {"logits_processors": [saying(spoken)], "max_tokens": len(spoken) + 2 + len(end)}
    kept, free = answer(llm, FIRST, 2, **fields), answer(llm, FIRST, None, **fields)
    assert kept == spoken + free[len(spoken) : len(spoken) + 2] + end


@pytest.mark.parametrize("blocks", [None, 9])
def test_alone_or_in_a_batch_that_churns(llm: LLM, start: list[int], blocks: int | None) -> None:
    """With few blocks rows are preempted, and computed again from their tokens."""
    prompts = [[*FIRST, *range(10, 10 + index), *(start if index % 2 else [])] for index in range(9)]
    params = [
        SamplingParams(**{**GREEDY, "temperature": index % 2, "seed": index, "thinking_token_budget": index % 4})
        for index in range(9)
    ]
    alone = [tokens(run(llm, prompt, own))[0] for prompt, own in zip(prompts, params, strict=True)]
    if blocks is None:
        assert tokens(run(llm, prompts, params)) == alone
        return
    size = llm.config.cache_config.kv_cache_memory_bytes // llm.config.cache_config.num_blocks
    few = {"kv_cache_memory_bytes": size * blocks, "max_model_len": 40, "max_num_batched_tokens": 7}
    with open_llm(reasoning_config=REASONING, max_num_seqs=6, **few) as small:
        assert tokens(run(small, prompts, params)) == alone


A, B, C = 1, 2, 3


@given(
    st.integers(0, 3),
    st.lists(st.sampled_from([A, B, C]), max_size=8),
    st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=12),
    st.sampled_from([([A], [B]), ([A], [B, B]), ([A, A], [B, C, B])]),
)
@settings(max_examples=150, deadline=None)
def test_no_section_is_longer_than_its_budget(
    budget: int, prompt: list[int], wishes: list[int], marks: tuple[list[int], list[int]]
) -> None:
    """Against a reading of the whole text: what is forced is forced for a reason, and everything that has one."""
    start, end = marks
    output: list[int] = []
    section = Section(budget, start, end, prompt, output)
    begun = tokens_inside(start, end, prompt, output) or 0
    for wish in wishes:
        forced = section.forced()
        inside = tokens_inside(start, end, prompt, output)
        assert (forced is not None) == (inside is not None and inside >= budget)
        assert inside is None or inside < max(budget, begun) + len(end)
        assert section.forced() == forced  # asking changes nothing
        assert Section(budget, start, end, prompt, list(output)).forced() == forced  # nor does beginning anew
        output.append(wish if forced is None else forced)


def tokens_inside(start: list[int], end: list[int], prompt: list[int], output: list[int]) -> int | None:
    """Generated and given tokens of the section that is open, None outside of any; token by token."""
    places = range(len(prompt) + 1)
    starts = [place for place in places if place >= len(start) and prompt[place - len(start) : place] == start]
    ends = [place for place in places if place >= len(end) and prompt[place - len(end) : place] == end]
    opened: int | None = None
    if starts and (not ends or starts[-1] > ends[-1]):
        opened = starts[-1] - len(prompt)
    for place in range(1, len(output) + 1):
        said = output[:place]
        if opened is None:
            opened = place if said[-len(start) :] == start else None
        elif said[-len(end) :] == end:
            opened = None
    return None if opened is None else len(output) - opened


def test_a_model_without_such_tokens_is_told_how_to_name_them() -> None:
    with open_llm() as plain:
        with pytest.raises(ValidationError, match=r"no tokens <think> and </think>; name its own with LLM\(reasoning"):
            answer(plain, FIRST, 4)
        assert answer(plain, FIRST, -1) == answer(plain, FIRST, None)
        assert plain.config.reasoning_config is None


def test_what_cannot_be_kept_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="thinking_token_budget must be None with structured_outputs"):
        answer(llm, FIRST, 4, ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=["a"]))
    for bad in (-2, 1.5, True, "4"):
        with pytest.raises(ValidationError, match="thinking_token_budget must be an integer of at least -1"):
            SamplingParams(thinking_token_budget=bad)  # type: ignore[arg-type]
    with (
        open_llm(skip_tokenizer_init=True, reasoning_config=REASONING) as blind,
        pytest.raises(ValidationError, match="None with skip_tokenizer_init=True"),
    ):
        answer(blind, FIRST, 4)
    for wrong in ({"think_start": "a"}, {"reasoning_start_str": 3}, "qwen3"):
        with pytest.raises(ValidationError, match="reasoning_config must be a dict of reasoning_parser, reasoning_st"):
            LLM(reasoning_config=wrong)  # type: ignore[arg-type]


def test_the_config_is_vllms(llm: LLM) -> None:
    assert llm.config.reasoning_config == ReasoningConfig(**REASONING)
    assert ReasoningConfig.of(llm.config.reasoning_config) is llm.config.reasoning_config
