"""Where a structured answer ends: one that its last allowed token closes has ended by itself; and answers as data."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from embedded import open_llm, run

from llm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from llm.jobs.journal import output_from_json
from llm.output_formats import output_as_json

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "a" rest\nrest: "b" | "c" start'  # no length is known: llguidance alone


class Person(pydantic.BaseModel):
    """Even numbers alone, which the schema does not say."""

    name: str = pydantic.Field(max_length=3)
    digits: int = pydantic.Field(ge=10, le=99)

    @pydantic.field_validator("digits")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class Closed(pydantic.BaseModel):
    name: str
    inner: Person
    map: dict[str, int]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=128) as opened:
        yield opened


def params(count: int | None = None, **kind: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, structured_outputs=StructuredOutputsParams(**kind))


@pytest.mark.parametrize("kind", [{"json": SCHEMA}, {"choice": ["qzq"]}, {"regex": "q{3}zx"}, {"grammar": GRAMMAR}])
def test_an_answer_closed_by_its_last_token_ends_with_stop(llm: LLM, kind: dict[str, Any]) -> None:
    [free] = run(llm, "And", params(100, **kind))
    assert free.outputs[0].finish_reason == "stop"
    closing = [token for token in free.outputs[0].token_ids if token != 0]
    outputs = run(llm, ["And"] * 2, [params(len(closing) + more, **kind) for more in (0, 1)])
    for output, tokens in zip(outputs, (closing, free.outputs[0].token_ids), strict=True):
        own = output.outputs[0]
        assert (own.finish_reason, own.stop_reason, own.text) == ("stop", None, free.outputs[0].text)
        assert own.token_ids == tokens and own.structured is not None and own.structured.complete


@pytest.mark.parametrize(
    "kind", [{"regex": "a+"}, {"json": {"type": "integer", "minimum": 5}}, {"choice": ["ab", "abc"]}]
)
def test_an_answer_that_could_go_on_ends_with_length(llm: LLM, kind: dict[str, Any]) -> None:
    """The negative control: complete, but nothing says that it is all of it."""
    structure = llm._preprocessor.structure(StructuredOutputsParams(**kind))
    text = {"regex": "a", "json": "7", "choice": "ab"}[next(iter(kind))]
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert structure.is_complete(ids) and not structure.is_closed(ids)
    own = run(llm, "And", params(1, regex="a+"))[0].outputs[0]
    assert own.finish_reason == "length" and own.structured is not None and own.structured.complete


def test_a_stop_token_is_still_left_out_of_the_text(llm: LLM) -> None:
    [free] = run(llm, "And", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    token = free.outputs[0].token_ids[3]
    own = run(llm, "And", SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[token]))[0].outputs[0]
    assert own.stop_reason == token and own.text == llm.get_tokenizer().decode([*own.token_ids[:-1]])


def test_json_answers_are_data(llm: LLM) -> None:
    asked = params(json=SCHEMA)
    [output] = run(llm, "And", asked)
    assert output.parsed == output.outputs[0].parsed == json.loads(output.outputs[0].text)
    assert run(llm, "And", params(8, choice=["x"]))[0].parsed is None
    assert run(llm, "And", SamplingParams(max_tokens=2))[0].parsed is None
    assert output_from_json(output_as_json(output), asked).parsed == output.parsed


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        (Open, ['{"name":"a"}', '{"name":"a","b":1}']),
        (Closed, ['{"name":"a","inner":{"name":"b","digits":10},"map":{"x":1}}']),
    ],
)
def test_a_pydantic_model_is_closed_unless_it_says_otherwise(llm: LLM, model: Any, fits: list[str]) -> None:
    structure = llm._preprocessor.structure(StructuredOutputsParams(json=model))
    tokenizer = llm.get_tokenizer()
    more = fits[-1][:-1] + ',"more":1}'
    found = [structure.is_complete(tokenizer.encode(text, add_special_tokens=False)) for text in [*fits, more]]
    assert found == [*[True] * len(fits), model is Open]


def test_a_pydantic_model_parses_its_answers(llm: LLM) -> None:
    asked = params(json=Person)
    asked.temperature, asked.n, asked.seed = 1.0, 8, 1
    [output] = run(llm, "And", asked)
    right = [own for own in output.outputs if json.loads(own.text)["digits"] % 2 == 0]
    assert all(own.structured is not None and own.structured.complete for own in output.outputs)
    assert 0 < len(right) < 8
    for own in output.outputs:
        assert own.parsed == (Person.model_validate_json(own.text) if own in right else None)
    assert asked.structured_outputs is not None and asked.structured_outputs.json == Person.model_json_schema()
    assert pickle.loads(pickle.dumps(asked.structured_outputs)) == asked.structured_outputs
    assert asked.structured_outputs.disable_additional_properties
    json.dumps(output.to_dict())
    with pytest.raises(ValidationError, match="json must be a schema, or a pydantic model, got 'int'"):
        StructuredOutputsParams(json=int)  # type: ignore[arg-type]
