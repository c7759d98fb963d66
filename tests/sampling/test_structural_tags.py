"""`structural_tag`: free text in which each beginning is followed by JSON of its schema and by its end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from embedded import PROMPTS, open_llm, run

from llm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from llm.sampling.structured.language import Language
from llm.sampling.structured.structural_tag import format_language
from llm.sampling.structured.structure import ConstrainedAnswer, Structure

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
    answer = ConstrainedAnswer(structure)
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
        ("[" * 100_000, "it is no JSON"),
        ({"a": json.loads("[" * 200 + "]" * 200)}, "nested too deeply"),
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


CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TOOL = {"begin": "<f=x>", "content": CONTENT, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TOOL]}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
SEPARATED = {"type": "tags_with_separator", "tags": [{"type": "tag", **TOOL}], "separator": ", "}
CALL = '<f=x>{"a":3}</f>'
# A format, the texts that it admits, and those that it does not.
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a "b"/c'}, ['a "b"/c'], ["a", 'a "b"/c.']),
    (CONTENT, ['{"a":3}'], ['{"a":"3"}', '{"a": 3}', '{"a":3} ']),
    ({"type": "regex", "pattern": r"\d+/[ab]|\/"}, ["12/a", "/"], ["12", "12/c", "12/a/"]),
    ({"type": "any_text"}, ["", "God\nsaid <f="], []),
    (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}, CONTENT]},
        ['So: {"a":3}'],
        ["So: ", '{"a":3}'],
    ),
    ({"type": "or", "elements": [CONTENT, {"type": "const_string", "value": "no"}]}, ['{"a":3}', "no"], ['no{"a":3}']),
    ({"type": "tag", **TOOL}, [CALL], [CALL + CALL, "And " + CALL]),
    (THINK, ["<t></t>", "<t>a < b\n</t>"], ["<t>a", "a</t>", "<t>a</t>b"]),
    (TRIGGERED, ["", "And", CALL, f"And {CALL} he {CALL}."], ["<f=y>", f"And {CALL[:-1]}", '<f=x>{"b":3}</f>']),
    ({**TRIGGERED, "at_least_one": True}, [CALL, f"{CALL} he {CALL}."], ["", "And", f"And {CALL}"]),
    ({**TRIGGERED, "stop_after_first": True}, ["", "And", f"And {CALL}"], [CALL + ".", CALL + CALL]),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, [CALL], ["", "And", f"And {CALL}", CALL + "."]),
    (SEPARATED, ["", CALL, f"{CALL}, {CALL}"], [f"{CALL}{CALL}", f"{CALL}, ", " "]),
    ({**SEPARATED, "at_least_one": True, "separator": ""}, [CALL, CALL * 3], ["", "And"]),
    ({**SEPARATED, "at_least_one": True, "stop_after_first": True}, [CALL], ["", f"{CALL}, {CALL}"]),
    (
        {"type": "sequence", "elements": [THINK, TRIGGERED]},
        ["<t>hm</t>", f"<t>{CALL[:-1]}</t> And {CALL}"],
        [CALL, "<t>hm", "<t>hm</t><f=y>"],
    ),
    (
        {"type": "tag", "begin": "[", "content": {**SEPARATED, "separator": ","}, "end": "]"},
        ["[]", f"[{CALL},{CALL}]"],
        [f"[{CALL},]", f"[{CALL}"],
    ),
]


@pytest.mark.parametrize(("given", "fitting", "others"), FORMATS)
def test_formats_admit_their_texts_and_no_others(
    llm: LLM, given: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    structure = compiled(llm, json.dumps({"type": "structural_tag", "format": given}))
    for text in fitting:
        assert structure.is_complete(ids_of(llm, text)), text
    for text in others:
        assert not structure.is_complete(ids_of(llm, text)), text


@pytest.mark.parametrize(("given", "fitting", "others"), [row for row in FORMATS if "triggers" not in str(row[0])])
def test_the_language_that_bounds_a_format_has_its_texts(
    given: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    language = Language()
    root = format_language(language, given, ())
    language.close()
    assert all(language.nullable[language.read(root, text.encode())] for text in fitting)
    assert not any(language.nullable[language.read(root, text.encode())] for text in others)


@pytest.mark.parametrize("end", ["</t>", "aab", "abab", "é<é", "aaa"])
def test_free_text_ends_at_the_first_end(end: str) -> None:
    language = Language()
    tag = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
    root = format_language(language, tag, ())
    language.close()
    for letters in itertools.product(sorted({*end, "x"}), repeat=4):
        text = "".join(letters) + end
        assert language.nullable[language.read(root, text.encode())] == (text.find(end) == len(text) - len(end)), text


def test_special_tokens_in_formats_are_tokens(llm: LLM) -> None:
    """<|user|> is one token of this model; text that spells it in others is not it."""
    tag = {"type": "tag", "begin": "<|user|>hi", "content": {"type": "any_text"}, "end": "<|assistant|>"}
    structure = compiled(llm, {"format": tag})
    ids = ids_of(llm, "<|user|>hi Moses<|assistant|>")
    assert structure.is_complete(ids) and not structure.is_complete(ids[:-1]) and not structure.is_complete(ids[1:])
    spelled = [token for piece in ("<|", "user", "|>") for token in ids_of(llm, piece)]
    assert not structure.is_complete([*spelled, *ids[1:]])
    called = compiled(llm, {"format": {**TRIGGERED, "triggers": ["<|user|>"], "tags": [tag]}})
    assert called.is_complete(ids_of(llm, "And ") + ids) and not called.is_complete(ids_of(llm, "And ") + ids[:-1])


def test_a_request_with_a_format(llm: LLM) -> None:
    given = StructuredOutputsParams(structural_tag={"format": {"type": "sequence", "elements": [THINK, CONTENT]}})
    params = SamplingParams(max_tokens=40, seed=3, structured_outputs=given, logit_bias=dict.fromkeys(range(300), 0.0))
    for output in run(llm, PROMPTS, params):
        outcome = output.outputs[0].structured
        assert output.outputs[0].error is None and outcome is not None and not outcome.guaranteed
        assert output.outputs[0].text.startswith("<t>")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "grammar", "grammar": "root ::= x"}, "must be one of const_string, json_schema, .*, got 'grammar'"),
        ([], "must be one of const_string"),
        ({"type": "tag"}, "the begin of a format tag is None"),
        ({"type": "tag", "begin": "", "content": {"type": "x"}, "end": ""}, "got 'x'"),
        ({"type": "any_text", "excludes": ["x"]}, "a format any_text has no 'excludes'"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, CONTENT]}, "nothing ends the text of any_text here"),
        ({"type": "or", "elements": [TRIGGERED, CONTENT]}, "nothing ends the text of triggered_tags here"),
        ({"type": "tag", "begin": "a", "content": TRIGGERED, "end": "b"}, "nothing ends the text of triggered_tags"),
        ({**TRIGGERED, "triggers": ["<g="]}, "starts with none of the triggers"),
        ({**TRIGGERED, "triggers": ["<f", "<f="]}, "starts with several of the triggers"),
        ({**TRIGGERED, "at_least_one": 1}, "at_least_one is 1, must be true or false"),
        ({**TRIGGERED, "tags": [CONTENT]}, "a list of at least one tag"),
        ({**SEPARATED, "tags": []}, "a list of at least one tag"),
        ({"type": "or", "elements": []}, "at least one element"),
        ({"type": "regex", "pattern": "a\nb"}, "no line breaks"),
        ({"type": "regex", "pattern": "("}, "structural_tag of structured_outputs is not usable"),
        ({**THINK, "end": "x<|end|>"}, "its special token must come first"),
    ],
)
def test_formats_that_are_not_understood_are_refused(llm: LLM, given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        compiled(llm, {"type": "structural_tag", "format": given})
    assert "\n" not in str(caught.value)
