"""`BeamSearchParams(structured_outputs=...)`: beams are answers of the form, ranked by the model's own logprobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from embedded import PROMPTS, assert_idle, open_llm

from llm import LLM, BeamSearchOutput, BeamSearchParams, StructuredOutputsParams, ValidationError

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, kv_cache_dtype="float32") as opened:
        yield opened
        assert_idle(opened)


def search(llm: LLM, width: int, max_tokens: int, **kind: Any) -> list[BeamSearchOutput]:
    params = BeamSearchParams(
        width, max_tokens, include_stop_str_in_output=True, structured_outputs=StructuredOutputsParams(**kind)
    )
    return llm.beam_search(PROMPTS, params)


def answer(llm: LLM, output: BeamSearchOutput, index: int, prompt: str) -> tuple[str, list[int]]:
    tokens = output.sequences[index].tokens[len(llm.get_tokenizer().encode(prompt)) :]
    return llm.get_tokenizer().decode(tokens, skip_special_tokens=True), tokens


def test_beams_are_choices_ranked_by_their_own_logprob(llm: LLM) -> None:
    choices = ["and", "the LORD", "king"]
    for prompt, output in zip(PROMPTS, search(llm, 3, 16, choice=choices), strict=True):
        answers = [answer(llm, output, index, prompt) for index in range(3)]
        assert {text for text, _ in answers} <= set(choices)
        assert len({tuple(tokens) for _, tokens in answers}) == 3  # a choice can be spelled by other tokens
        scores = [sequence.score for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)
        ids = llm.get_tokenizer().encode(prompt)
        for (_, tokens), sequence in zip(answers, output.sequences, strict=True):
            [alone] = llm.loglikelihood([ids], [tokens], use_tqdm=False)
            assert sequence.cum_logprob == pytest.approx(alone.logprob, abs=1e-4)


@pytest.mark.parametrize("room", [3, 6, 12])
def test_answers_are_complete_in_any_budget(llm: LLM, room: int) -> None:
    for prompt, output in zip(PROMPTS, search(llm, 2, room, regex="[a-z]{2,9}!"), strict=True):
        for index in range(len(output.sequences)):
            text, tokens = answer(llm, output, index, prompt)
            assert re.fullmatch("[a-z]{2,9}!", text) and len(tokens) <= room


def test_a_schema(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    [output, *_] = search(llm, 2, 30, json=schema | {"additionalProperties": False})
    found = [json.loads(answer(llm, output, index, PROMPTS[0])[0]) for index in range(len(output.sequences))]
    assert found and all(item in ({"a": 1}, {"a": 22}) for item in found)


def test_what_cannot_be_searched_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="max_tokens must be at least the 8 tokens"):
        search(llm, 2, 3, choice=["the LORD"])
    with pytest.raises(ValidationError, match="structured_outputs must be a StructuredOutputsParams"):
        llm.beam_search(PROMPTS, BeamSearchParams(2, 2, structured_outputs={"regex": "a"}))  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="ignore_eos must be False with structured_outputs"):
        BeamSearchParams(2, 2, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a"))
