"""`structural_tag`: free text in which each beginning is followed by JSON of its schema and by its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from embedded import PROMPTS, open_llm, run

from llm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from llm.sampling.structured.structure import Answer, Structure

pytest.importorskip("llguidance")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=128) as opened:
        yield opened


def compiled(llm: LLM, tag: Any = TAG) -> Structure:
    return llm._preprocessor._structures.compile(StructuredOutputsParams(structural_tag=tag))


def ids_of(llm: LLM, text: str) -> list[int]:
    tokenizer = llm._preprocessor.tokenizer
    assert tokenizer is not None
    return tokenizer.encode_rendered([text])[0]


@pytest.mark.parametrize("tag", [TAG, json.dumps(TAG)])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("In the beginning", True),
        ('And <f=x>{"a":3}</f> he said', True),
        ('<f=x>{"a":3}</f><f=x>{"a":4}</f>', True),
        ('<f=x>{"a":"three"}</f>', False),
        ('<f=x>{"b":3}</f>', False),
        ('<f=x>{"a":3}', False),
        ('<f=y>{"a":3}</f>', False),
        ('<f=x>{"a": 3}</f>', False),
    ],
)
def test_what_follows_a_beginning_is_of_its_schema(llm: LLM, tag: Any, text: str, fits: bool) -> None:
    assert compiled(llm, tag).is_complete(ids_of(llm, text)) is fits


def test_after_a_beginning_the_object_comes(llm: LLM) -> None:
    """The mask itself: a brace, or more than one of its characters, and no other text."""
    structure = compiled(llm)
    answer = Answer(structure)
    for token in ids_of(llm, "And <f=x>"):
        answer.read(token)
    allowed = answer.allowed(50).nonzero()[0].tolist()
    assert allowed and all(structure.vocabulary.token_bytes[token].startswith(b"{") for token in allowed)


def test_a_request_with_tags(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=3, structured_outputs=StructuredOutputsParams(structural_tag=TAG))
    for output in run(llm, PROMPTS, params):
        outcome = output.outputs[0].structured
        assert output.outputs[0].error is None and outcome is not None and not outcome.guaranteed


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("{", "it is no JSON"),
        ({"format": {"type": "tag"}}, "it must be {'structures': "),
        ({"structures": [], "triggers": ["<"]}, "it must be {'structures': "),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<"]}, "it must be {'structures': "),
        ({**TAG, "triggers": ["[", 3]}, "'<f=x>' starts with none of the triggers"),
        ({**TAG, "structures": [{"begin": "<f=x>", "schema": True, "end": ""}]}, "a schema is a JSON object"),
    ],
)
def test_other_forms_are_refused(llm: LLM, tag: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        compiled(llm, tag)
    assert said in str(caught.value) and "\n" not in str(caught.value)
