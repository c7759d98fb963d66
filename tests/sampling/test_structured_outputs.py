"""Structured output: every answer is what was asked for, and complete within its budget or refused before it starts."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest
from embedded import assert_idle, engine_of, open_llm, run, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from llm import LLM, SamplingParams, StructuredOutputsParams, ValidationError
from llm.sampling.structured.json_schema import TooManyChoices, compile_schema
from llm.sampling.structured.language import EMPTY, IMPOSSIBLE, Language, Needs, TokenReader
from llm.sampling.structured.regex import UnknownLength, ascii_classes, integer_range, parse_regex, utf8
from llm.sampling.structured.schema import read_schema
from llm.sampling.structured.structure import ConstrainedAnswer, Structure, StructureCompiler, Vocabulary
from llm.sampling_params import RepetitionDetectionParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
# As pydantic writes them: titles, defaults, optional values as anyOf.
PYDANTIC = {
    "$defs": {"Kind": {"enum": ["king", "priest"], "title": "Kind", "type": "string"}},
    "properties": {
        "kind": {"$ref": "#/$defs/Kind"},
        "born": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Born"},
        "sons": {"items": {"type": "string"}, "title": "Sons", "type": "array", "maxItems": 3},
    },
    "required": ["kind", "sons"],
    "title": "Man",
    "type": "object",
}
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 3}
SCHEMAS: dict[str, Any] = {
    "texts": TEXTS,
    "person": PERSON,
    "tree": TREE,
    "pydantic": PYDANTIC,
    "open object": {"type": "object", "properties": {"a": {"type": "null"}, "ab": {"type": "boolean"}}},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "undeclared": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["y", "x"],
        "additionalProperties": {"type": "null"},
    },
    "anything": {},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "items": {"type": "string"}},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False},
    "tuple and more": {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "boolean"}],
        "items": {"type": "integer"},
        "minItems": 3,
        "maxItems": 5,
    },
    "enum": {"enum": ["a", 1, {"b": [1, 2]}, 'é"', None]},
    "const": {"const": "so be it"},
    "types": {"type": ["string", "null", "integer"]},
    "one of": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "all of": {"allOf": [{"type": "boolean"}]},
    "short text": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": r"^[a-c]+-\d{2,3}$"},
    "search": {"type": "string", "pattern": "ab"},
    "quotes": {"type": "string", "pattern": r'^.[^x]\s"$'},
    "range": {"type": "integer", "minimum": -15, "maximum": 237},
    "from": {"type": "integer", "exclusiveMinimum": 5},
    "to": {"type": "integer", "maximum": -3},
    "number": {"type": "number"},
    "multiple": {"type": "integer", "multipleOf": 7},
    "multiples": {"type": "array", "items": {"type": "integer", "multipleOf": 64}, "minItems": 1, "maxItems": 2},
    "multiple of a fraction": {"type": "integer", "multipleOf": 2.5},
}
REGEXES = [
    "a|bb|ccc",
    "[a-z]{2,5}(-[0-9]+)?",
    "(foo|bar)*x",
    ".{3}",
    r"[^a\n]+",
    r"\d{3}-\w+\s?",
    "^abc$",
    "(?:x|y){2,3}?z",
    "[é-ü]+!",
    r"\x41\u00e9",
    "(a?){3}b",
    r"\.\*[\]\-]",
]
CHOICES = [["Moses"], ["Moses", "Aaron", "king David"], ["é", "ééé", "a\nb", '"']]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_num_seqs=4, kv_cache_dtype="float32") as llm:
        yield llm


def structured(max_tokens: int | None = 40, temperature: float = 1.0, **kind: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**kind), seed=7
    )


def compiled(llm: LLM, **kind: Any) -> Structure:
    compiler: StructureCompiler = llm._preprocessor._structures
    return compiler.compile(StructuredOutputsParams(**kind))


KINDS = [
    *({"json": schema} for schema in SCHEMAS.values()),
    *({"regex": pattern} for pattern in REGEXES),
    *({"choice": choices} for choices in CHOICES),
    {"json_object": True},
]


def is_valid(text: str, kind: dict[str, Any]) -> bool:
    if "regex" in kind:
        return re.fullmatch(kind["regex"], text) is not None
    if "choice" in kind:
        return text in kind["choice"]
    value = json.loads(text)
    jsonschema.validate(value, kind.get("json", {"type": "object"}))
    # Compact: what json writes is as short, but for numbers like 1e5 and escapes that it need not write.
    return not re.search(r"[,:] ", re.sub(r'"(\\.|[^"\\])*"', '""', text))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind)[:60])
def test_answers_are_valid_and_complete_in_any_budget(llm: LLM, kind: dict[str, Any]) -> None:
    needed = compiled(llm, **kind).tokens_needed
    assert needed is not None
    params = [structured(needed + more, temperature, **kind) for more in (0, 1, 3, 9) for temperature in (0.0, 1.0)]
    params += [structured(60, 1.0, **kind)]
    for output in run(llm, ["And he said"] * len(params), params):
        completion = output.outputs[0]
        assert completion.structured is not None and completion.structured.guaranteed
        assert completion.structured.complete, completion.text
        assert is_valid(completion.text, kind), completion.text
        assert completion.error is None
    assert_idle(llm)


@pytest.mark.parametrize("kind", [{"json": PERSON}, {"regex": r"[a-z]{2,5}(-[0-9]+)?x{20}"}, {"json": TEXTS}])
def test_without_the_bound_answers_are_cut(llm: LLM, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    needed = compiled(llm, **kind).tokens_needed
    monkeypatch.setattr(Structure, "fitting", lambda self, state, tokens, allowed: allowed)
    params = [structured((needed or 0) + more, 1.0, **kind) for more in range(0, 8, 2)]
    outcomes = [output.outputs[0].structured for output in run(llm, ["And he said"] * len(params), params)]
    assert not all(outcome is not None and outcome.complete for outcome in outcomes)


@pytest.mark.parametrize("kind", [{"json": PERSON}, {"regex": "x{30}"}, {"choice": ["Aaron", "king David"]}])
def test_what_cannot_fit_is_refused_with_what_it_needs(llm: LLM, kind: dict[str, Any]) -> None:
    needed = compiled(llm, **kind).tokens_needed
    assert needed is not None
    with pytest.raises(ValidationError, match=f"needs up to {needed} tokens.*room for {needed - 1};") as error:
        run(llm, ["x", "y"], structured(needed - 1, **kind))
    assert error.value.parameter == "max_tokens"


def test_where_no_bound_is_known_the_output_says_so(llm: LLM) -> None:
    grammar = 'start: "a" rest\nrest: "b" | "c" start'
    unknown = [{"grammar": grammar}, {"json": {"type": "string", "pattern": r"^\p{L}+$"}}, {"regex": r"(?i)abc"}]
    for kind in unknown:
        completion = run(llm, "x", structured(30, **kind))[0].outputs[0]
        assert completion.structured is not None
        assert not completion.structured.guaranteed and completion.structured.reason
        assert completion.structured.complete == (completion.finish_reason == "stop")
    assert re.fullmatch(r"(ac)*ab", run(llm, "x", structured(60, grammar=grammar))[0].outputs[0].text)


@pytest.mark.parametrize(
    "field",
    [
        *({"bad_words": ["x"]}, {"stop": ["q"]}, {"logit_bias": {9: 1.0}}, {"allowed_token_ids": list(range(2304))}),
        *({"stop_token_ids": [2303]}, {"extra_args": {"a": 1}}, {"logits_processors": [lambda ids, logits: logits]}),
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=30)},
    ],
    ids=lambda field: next(iter(field)),
)
def test_nothing_is_guaranteed_next_to_what_can_interfere(llm: LLM, field: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(json=PERSON), seed=1, **field)
    outcome = run(llm, "x", params)[0].outputs[0].structured
    assert outcome is not None and not outcome.guaranteed and next(iter(field)) in outcome.reason


@pytest.mark.parametrize("asked", [None, 30, 1000])
def test_an_answer_is_complete_in_the_room_that_a_prompt_leaves(llm: LLM, asked: int | None) -> None:
    """Whatever is asked for: no more tokens fit than the longest sequence has."""
    room = 30
    prompt = [5] * (llm.config.model_config.max_model_len - room)
    kind = {"regex": "[a-z ]{0,300}x"}  # which nothing but the room keeps short
    params = [structured(asked, seed / 3, **kind) for seed in range(4)]
    for output in run(llm, [{"prompt_token_ids": prompt}] * len(params), params):
        completion = output.outputs[0]
        assert completion.structured is not None and completion.structured.guaranteed
        assert completion.structured.complete and is_valid(completion.text, kind), completion.text
        assert len(completion.token_ids) <= room


def test_few_tokens_and_many_are_judged_alike(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [structured(27 + index, seed, json=PERSON) for index, seed in enumerate((0.0, 0.5, 1.0))]
    expected = tokens(run(llm, ["x"] * 3, params))
    for few in (0, 1 << 20):
        monkeypatch.setattr("llm.sampling.structured.structure._FEW", few)
        assert tokens(run(llm, ["x"] * 3, params)) == expected


def test_a_structure_that_met_many_states_is_compiled_anew(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled(llm, json=TREE)
    assert compiled(llm, json=TREE) is before
    monkeypatch.setattr("llm.sampling.structured.structure._MOST_NODES", -1)
    assert compiled(llm, json=TREE) is not before


def test_a_preempted_row_goes_on_where_it_was() -> None:
    blocks = {"block_size": 16, "max_model_len": 80, "kv_cache_dtype": "float32", "enable_prefix_caching": False}
    params = [structured(60, 1.0, json=TEXTS) for _ in range(4)]
    prompts = [f"And {index}" for index in range(4)]
    with open_llm(**blocks) as roomy, open_llm(**blocks, kv_cache_memory_bytes=600_000) as tight:
        expected = [output.outputs[0] for output in run(roomy, prompts, params)]
        found = [output.outputs[0] for output in run(tight, prompts, params)]
        assert engine_of(tight).scheduler.num_preemptions > 0
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert all(item.structured is not None and item.structured.complete for item in found)


def test_rows_do_not_influence_each_other(llm: LLM) -> None:
    kinds = [{"json": PERSON}, {"regex": "[a-z]{3,9}"}, {"json": TREE}, {"choice": ["Moses", "Aaron"]}]
    params = [
        *(structured(30, **kind) for kind in kinds),
        SamplingParams(seed=3, max_tokens=20),
        structured(31, **kinds[0]),
    ]
    prompts = [f"And {index}" for index in range(len(params))]
    together = run(llm, prompts, params)
    alone = [run(llm, prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert together[4].outputs[0].structured is None
    many = run(
        llm, "x", SamplingParams(n=3, seed=5, max_tokens=30, structured_outputs=StructuredOutputsParams(json=PERSON))
    )
    assert len({completion.text for completion in many[0].outputs}) == 3
    assert all(completion.structured and completion.structured.complete for completion in many[0].outputs)


def test_no_thread_outlives_the_call_and_outputs_are_plain(llm: LLM) -> None:
    output = run(llm, "x", structured(json=PERSON))[0]
    assert "".join(llm.stream("x", structured(json=PERSON))) == output.outputs[0].text
    for _ in llm.stream("x", structured(json=PERSON)):
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llm-grammar")]
    assert output.params is not None and output.params.structure is None
    assert run(llm, "x", output.params)[0].outputs[0].text == output.outputs[0].text


def test_the_schema_as_text_as_a_model_and_closed(llm: LLM) -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return PERSON

    expected = run(llm, "x", structured(json=PERSON))[0].outputs[0].text
    model: Any = Model
    for schema in (json.dumps(PERSON), model):
        assert run(llm, "x", structured(json=schema))[0].outputs[0].text == expected
    opened = {key: value for key, value in PERSON.items() if key != "additionalProperties"}
    closed = run(llm, "x", structured(json=opened, disable_additional_properties=True))[0].outputs[0].text
    assert closed == expected


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": "{"}, "is not JSON"),
        ({"json": [1]}, "a schema is a JSON object"),
        ({"json": {"not": {"type": "string", "format": "date"}}}, "it cannot be followed.*'not' of 'formats'"),
        ({"json": {"not": {"uniqueItems": True}}}, "it cannot be followed.*'not' of 'uniqueItems'"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": ""}, "not empty"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"choice": []}, "at least one text"),
        ({"choice": ["a", ""]}, "at least one text"),
        ({"json_object": False}, "only be True"),
        ({"json": PERSON, "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(llm: LLM, kind: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as error:
        run(llm, "x", structured(**kind))
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert error.value.parameter in kind


def test_what_does_not_go_together(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["a"])
    for field in ({"ignore_eos": True}, {"min_tokens": 1}):
        with pytest.raises(ValidationError, match="structured_outputs") as error:
            run(llm, "x", SamplingParams(structured_outputs=choice, max_tokens=5, **field))
        assert error.value.parameter in field
    with pytest.raises(ValidationError, match="exactly one"):
        StructuredOutputsParams(choice=["a"], regex="b")


def test_a_model_that_ends_no_answer_is_refused() -> None:
    with pytest.raises(ValidationError, match="structured_outputs cannot be used: the model has no EOS token to end"):
        Vocabulary(None, 512, [])


def test_llguidance_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with open_llm() as llm, pytest.raises(ValidationError, match=r"pip install 'offline-llm\[structured\]'"):
        run(llm, "x", structured(json=PERSON))


# --- Our languages ----------------------------------------------------------------------------------------------------


def regex(language: Language, pattern: str) -> int:
    return parse_regex(language, pattern, lambda ranges: utf8(language, ranges))


def language_of(kind: dict[str, Any]) -> tuple[Language, int]:
    language = Language()
    root = compile_schema(language, kind["json"]) if "json" in kind else regex(language, kind["regex"])
    language.close()
    return language, root


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "json" in kind or "regex" in kind], ids=lambda k: str(k)[:60]
)
def test_our_language_is_llguidances(llm: LLM, kind: dict[str, Any]) -> None:
    """Byte by byte along random strings: the same bytes can follow, and the same strings are answers."""
    structure = compiled(llm, **kind)
    language, root = structure.language, structure.root
    assert language is not None
    vocabulary = structure.vocabulary
    one = {data[0]: token for token, data in vocabulary.token_bytes.items() if len(data) == 1}
    words = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
    chance = random.Random(str(kind))
    for _ in range(8):
        state, matcher, read = root, structure.matcher(), b""
        for length in range(60):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            ours = {byte for byte in one if language.needs[language.step(state, byte)] < IMPOSSIBLE}
            theirs = set() if matcher.is_stopped() else {byte for byte, token in one.items() if bits[token]}
            forced = matcher.compute_ff_bytes()  # then llguidance's mask holds the longest token of them only
            assert ours == ({forced[0]} if forced and not matcher.is_stopped() else theirs), read
            assert matcher.is_accepting() == language.nullable[state], read
            if not ours or (length > 30 and language.nullable[state]):
                break
            likely = [byte for byte in sorted(ours) if byte in b'{}[]",:\\-0ae1.']
            byte = chance.choice(likely if likely and chance.random() < 0.7 else sorted(ours))
            if length > 30:  # the shortest way out
                byte = min(ours, key=lambda byte: language.needs[language.step(state, byte)])
                assert language.needs[language.step(state, byte)] == language.needs[state] - 1
            state = language.step(state, byte)
            assert language.needs[state] <= language.reach[root]
            matcher.consume_token(one[byte])
            read += bytes([byte])


ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "ab", "(a|bb)"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(lambda p: f"({p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(pattern=PATTERNS, text=st.text(alphabet="abc", max_size=6))
def test_languages_are_regular_expressions(pattern: str, text: str) -> None:
    """Membership as Python's `re`; no string of the language is shorter than `needs`, and one is as short."""
    language, root = language_of({"regex": pattern})
    state = language.read(root, text.encode())
    assert language.nullable[state] == (re.fullmatch(pattern, text) is not None)
    level, length = {root}, 0
    while not any(language.nullable[node] for node in level):
        level = {language.step(node, byte) for node in level for byte in b"abc"} - {EMPTY}
        length += 1
    assert language.needs[root] == length


@settings(max_examples=60)
@given(low=st.integers(-400, 400), size=st.integers(0, 900), value=st.integers(-1500, 1500))
def test_integer_ranges(low: int, size: int, value: int) -> None:
    inside = low <= value <= low + size
    assert (re.fullmatch(integer_range(low, low + size), str(value)) is not None) == inside
    assert (re.fullmatch(integer_range(low, None), str(value)) is not None) == (value >= low)
    assert (re.fullmatch(integer_range(None, low), str(value)) is not None) == (value <= low)


def test_needs_of_whole_tokens_are_those_of_their_bytes() -> None:
    language, root = language_of({"json": TREE})
    token_bytes = {3: b"{", 4: b'{"value":', 5: b"1", 6: b'{"value":1,"next":null}', 7: b"x", 9: b""}
    needs = Needs(language, TokenReader(token_bytes, 12)).after(root)
    expected = [
        language.needs[language.read(root, token_bytes[token])] if token_bytes.get(token) else IMPOSSIBLE
        for token in range(12)
    ]
    assert needs.tolist() == expected and 0 in expected and IMPOSSIBLE in expected


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", r"\ba", "(a", "a)", "[z-a]", "[[:alpha:]]", "a{2,1}", r"\p{L}", "a^b", "*"]
)
def test_patterns_that_are_not_read(pattern: str) -> None:
    with pytest.raises(UnknownLength):
        regex(Language(), pattern)


def test_classes_are_written_out() -> None:
    assert ascii_classes(r"\d[\w-]\\d\S") == r"[0-9][0-9A-Za-z_-]\\d[^ \t\n\r\f\v]"


def compiler_lacking(llm: LLM, monkeypatch: pytest.MonkeyPatch, lacking: set[int]) -> StructureCompiler:
    """For a vocabulary that is the model's, without tokens for these bytes."""
    vocabulary = compiled(llm, regex="a").vocabulary
    monkeypatch.setattr(vocabulary.reader, "bytes_that_are_tokens", set(range(0xF5)) - lacking)
    return StructureCompiler(lambda: vocabulary)


@pytest.mark.parametrize("kind", [{"json": {"type": "string"}}, {"regex": '"[^"]*"'}], ids=str)
def test_bytes_without_a_token_are_left_out(llm: LLM, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of SmolLM2: control characters, and planes of Unicode that are not used."""
    texts = ['"é\U0001f600\U0003ffff"', '"\U00040000"', '"\U000fffff"', '"\x06"']
    found = {}
    for lacking in ({0x06, 0xF1, 0xF2}, set()):
        structure = compiler_lacking(llm, monkeypatch, lacking).compile(StructuredOutputsParams(**kind))
        assert structure.tokens_needed == 2
        found[bool(lacking)] = [is_answer(structure, text) for text in texts]
    is_regex = "regex" in kind
    assert found == {True: [True, False, True, False], False: [True, True, True, is_regex]}


def test_a_choice_that_no_token_writes_is_left_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_lacking(llm, monkeypatch, {0x06})
    structure = compiler.compile(StructuredOutputsParams(choice=["a\x06", "abc", "\x06" * 99]))
    assert structure.tokens_needed == 3 and not is_answer(structure, "a\x06") and is_answer(structure, "abc")


def test_letters_without_tokens_cost_the_guarantee(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    structure = compiler_lacking(llm, monkeypatch, {0xC3}).compile(StructuredOutputsParams(json=PERSON))
    assert structure.tokens_needed is None and "no token for some bytes" in structure.why_unknown


def test_what_is_not_guaranteed_is_warned_of_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    compiler: StructureCompiler = llm._preprocessor._structures
    compiler._warned.clear()
    for _ in range(2):
        run(llm, "x", [structured(9, grammar='start: "a" | "b" start')])
        run(llm, "x", structured(30, json=PERSON))
        stop = StructuredOutputsParams(json=PERSON)
        run(llm, "x", SamplingParams(max_tokens=30, stop=["q"], structured_outputs=stop))
    said = [record.getMessage() for record in caplog.records if "not guaranteed" in record.getMessage()]
    assert len(said) == 2 and "grammar" in said[0] and "stop can mask or cut" in said[1]


def test_long_choices_take_no_more_than_their_bytes(llm: LLM) -> None:
    choices = ["a" * 10**6, "a" * 999_999 + "b", "b" * 10**6, "c"]
    language = Language()
    root = language.words(choice.encode() for choice in choices)
    assert len(language.kinds) < 20
    assert [language.nullable[language.read(root, text.encode())] for text in ("a", "bb", "c")] == [False, False, True]
    assert language.needs[language.read(root, b"a" * 100)] == 999_900
    completion = run(llm, "x", structured(5, choice=choices))[0].outputs[0]
    assert completion.text == "c" and completion.structured is not None and completion.structured.guaranteed
    with pytest.raises(ValidationError, match=r"a pattern has 100001 characters and at most 100000 are read"):
        run(llm, "x", structured(5, regex="a" * 100_001))


def test_repetition_detection_can_cut_an_answer(llm: LLM) -> None:
    repeats = StructuredOutputsParams(regex="(ab){20}")
    detect = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=repeats, repetition_detection=detect)
    completion = run(llm, "Once", params)[0].outputs[0]
    assert completion.finish_reason == "repetition" and completion.structured is not None
    assert not completion.structured.complete and not completion.structured.guaranteed
    assert "repetition_detection" in completion.structured.reason


# --- What was promised holds ------------------------------------------------------------------------------------------

INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
# llguidance's lexer gives up on the first within an answer, its parser on the others.
BEYOND_THE_LIMITS: list[dict[str, Any]] = [
    {"regex": r"(.{0,200}\n?){0,50}"},
    {"regex": r"(([ab]{0,50}c?){0,50}d?){0,50}x"},
    {"choice": [f"value {index}" for index in range(3000)]},
    {"json": {"enum": [f"value {index}" for index in range(3000)]}},
    {"json": {"type": "object", "properties": {f"p{index}": INTEGER for index in range(505)}, "maxProperties": 505}},
]
BEYOND_THE_LIMITS[-1]["json"]["additionalProperties"] = False


@pytest.mark.parametrize("kind", BEYOND_THE_LIMITS, ids=lambda kind: str(kind)[:30])
def test_answers_beyond_the_librarys_limits_are_complete_and_each_rows_own(llm: LLM, kind: dict[str, Any]) -> None:
    prompts = ["And he said", "In the land of", "Moses"]
    params = [structured(45, **kind) for _ in prompts]
    together = run(llm, prompts, params)
    assert tokens(together[:2]) == tokens([run(llm, prompts[index], params[index])[0] for index in range(2)])
    for output in together:
        completion = output.outputs[0]
        assert completion.error is None and completion.structured is not None
        assert completion.structured.guaranteed and completion.structured.complete, completion.text
        assert is_valid(completion.text, kind), completion.text


def test_rows_of_a_demanding_expression_do_not_use_up_each_others_limits(llm: LLM) -> None:
    """Where llguidance gives up is the same for each, also if the tokens are read at once; the language goes on."""
    structure = compiled(llm, **BEYOND_THE_LIMITS[0])
    text = b"and the lord said unto moses " * 5
    one = {data[0]: token for token, data in structure.vocabulary.token_bytes.items() if len(data) == 1}
    answers = [ConstrainedAnswer(structure) for _ in range(2)]
    read_by_llguidance = [0, 0]
    for index, answer in enumerate(answers):
        for byte in text:
            assert answer.allowed(IMPOSSIBLE)[one[byte]]
            answer.read(one[byte])
            read_by_llguidance[index] += answer._matcher is not None
    assert read_by_llguidance[0] == read_by_llguidance[1] < len(text)
    replayed = ConstrainedAnswer(structure)
    for byte in text:
        replayed.read(one[byte])
    assert replayed._matcher is None
    np.testing.assert_array_equal(replayed.allowed(500), answers[0].allowed(500))


@pytest.mark.parametrize("left", [0, 1, 2, 5, 60])
def test_an_answer_that_is_complete_may_end_however_few_tokens_are_left(llm: LLM, left: int) -> None:
    structure = compiled(llm, regex="[ab]{3}([ab]{2}){0,20}")
    one = {data[0]: token for token, data in structure.vocabulary.token_bytes.items() if len(data) == 1}
    for length in range(1, 9):
        answer = ConstrainedAnswer(structure)
        for _ in range(length):
            answer.read(one[ord("a")])
        allowed = answer.allowed(left)
        is_complete = length >= 3 and length % 2 == 1
        assert allowed[structure.vocabulary.eos_token_ids].all() == is_complete
        missing = max(3 - length, (length - 3) % 2) - 1 if not is_complete else 1
        assert allowed[one[ord("a")]] == (missing <= left)


def test_an_answer_without_a_continuation_is_an_error_and_no_stop(llm: LLM) -> None:
    structure = compiled(llm, regex="ab")
    one = {data[0]: token for token, data in structure.vocabulary.token_bytes.items() if len(data) == 1}
    answer = ConstrainedAnswer(structure)
    answer.read(one[ord("b")])
    with pytest.raises(RuntimeError, match="structured_outputs cannot go on with this answer"):
        answer.allowed(99)


def test_too_many_optional_properties_are_refused_before_the_start(llm: LLM) -> None:
    properties = {f"p{index}": INTEGER for index in range(3000)}
    schema = {"type": "object", "properties": properties}
    with pytest.raises(ValidationError, match=r"has 3000 optional properties in a row and at most \d+") as error:
        run(llm, "x", structured(json=schema))
    assert error.value.parameter == "json" and "\n" not in str(error.value)
    fewer = {name: INTEGER for name in list(properties)[:650]}
    with pytest.raises(TooManyChoices):
        compile_schema(Language(), {"type": "object", "properties": fewer})
    compile_schema(Language(), {"type": "object", "properties": fewer, "required": [f"p{i}" for i in range(0, 650, 9)]})


@pytest.mark.parametrize("depth", [128, 450, 900, 5000, 200_000])
def test_deep_and_endless_schemas_are_refused_in_one_sentence(llm: LLM, depth: int) -> None:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    endless: Any = {"type": "object"}
    endless["properties"] = {"a": endless}
    shared: Any = {"type": "integer"}
    for _ in range(60):
        shared = {"anyOf": [shared, shared]}
    for item in (schema, '{"items":' * depth + "{}" + "}" * depth, endless):
        with pytest.raises(ValidationError, match=r"nested too deeply.*objects inside each other\.$") as error:
            run(llm, "x", structured(json=item))
        assert error.value.parameter == "json" and "\n" not in str(error.value)
    with pytest.raises(ValidationError, match=r"more than \d+ values\.$"):
        run(llm, "x", structured(json=shared))


TRIVIAL = [
    {"properties": {"a": INTEGER}, "required": ["a"], "minProperties": 1},
    {"properties": {"a": INTEGER}, "minProperties": 0},
    {"properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False, "maxProperties": 2},
    {"properties": {"a": {**INTEGER, "multipleOf": 1}}, "required": ["a"], "additionalProperties": False},
    {"properties": {"a": {**INTEGER, "multipleOf": 0.1}}, "required": ["a"], "additionalProperties": False},
    {"properties": {"minProperties": {"const": {"type": "object", "minProperties": 0}}}, "required": ["minProperties"]},
]


@pytest.mark.parametrize("schema", TRIVIAL, ids=str)
def test_keywords_that_say_nothing_cost_no_guarantee(llm: LLM, schema: dict[str, Any]) -> None:
    kind = {"json": {"type": "object", **schema}}
    for output in run(llm, ["And he said"] * 4, [structured(60 + more, **kind) for more in range(4)]):
        completion = output.outputs[0]
        assert completion.structured is not None and completion.structured.guaranteed
        assert completion.structured.complete and is_valid(completion.text, kind)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2},
        {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "maxProperties": 1},
        {"type": "integer", "multipleOf": 2},
        {"type": "number", "multipleOf": 1},
        {"type": "integer", "multipleOf": 1.5},
    ],
    ids=str,
)
def test_keywords_that_say_something_are_kept(schema: dict[str, Any]) -> None:
    assert read_schema(schema, closed=False) == schema


@settings(max_examples=30)
@given(divisor=st.integers(2, 64), number=st.integers(-(10**6), 10**6))
def test_multiples_are_known_digit_by_digit(divisor: int, number: int) -> None:
    language, root = language_of({"json": {"type": "integer", "multipleOf": divisor}})
    for value in (number, number * divisor):
        assert language.nullable[language.read(root, str(value).encode())] == (value % divisor == 0)
    assert language.read(root, f"0{number}".encode()) == EMPTY  # no leading zeros
    assert language.reach[root] < IMPOSSIBLE


@settings(max_examples=60)
@given(
    value=st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: 1e-290 < abs(value) < 1e290),
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]),
        st.sampled_from([-100, -10, -1, -0.5, 0, 0.25, 1, 5, 9.5, 10, 10.5, 1000]),
        min_size=1,
        max_size=2,
    ),
)
def test_numbers_with_bounds_have_exponents_where_all_of_their_size_are_within(
    value: float, bounds: dict[str, float]
) -> None:
    schema = {"type": "number", **bounds}
    language, root = language_of({"json": schema})
    for text in (repr(value), f"{value:.3e}", f"{value:.0E}"):
        accepted = language.nullable[language.read(root, text.encode())]
        assert not accepted or jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (text, schema)
    for text, own in (
        ("1.5e-07", {"minimum": 0}),
        ("1e-07", {"exclusiveMinimum": 0, "maximum": 10}),
        ("1e+20", {"minimum": 0}),
        ("-1e-9", {"exclusiveMinimum": -10}),
        ("-2.5E300", {"maximum": 5}),
        ("9e-300", {"minimum": 0}),
    ):
        one, start = language_of({"json": {"type": "number", **own}})
        assert one.nullable[one.read(start, text.encode())] == ("300" not in text), text
    share, start = language_of({"json": {"type": "number", "minimum": 0, "maximum": 1}})
    assert share.read(start, b"9") == EMPTY  # whoever means 95 is not led to 9.5e-10


def test_multiples_are_known_by_their_remainders() -> None:
    """Of decimals that are told apart from others by an automaton."""
    generator = random.Random(5)
    for places in (0, 0, 1, 2, 3, 4):
        step = Decimal(generator.randint(1, 150)).scaleb(-places)
        language, root = language_of({"json": {"type": "number", "not": {"multipleOf": float(step)}}})
        for _ in range(20):
            number = generator.randint(-(10**9), 10**9)
            for value in (Decimal(number).scaleb(-3), number * step, number % 50 * step / 10):
                accepts = language.nullable[language.read(root, format(value, "f").encode())]
                assert accepts == (Fraction(value) % Fraction(step) != 0), (step, value)


@pytest.mark.parametrize("seed", range(3))
def test_what_random_schemas_admit_is_valid(seed: int) -> None:
    """No object with a repeated name, either, whose last value is wrong."""
    texts = [json.dumps(value, separators=(",", ":")) for value in VALUES]
    texts += ['{"c":1,"c":"a"}', '{"c":"a","c":1}', '{"ab":1,"c":2,"ab":"a"}', '{"ab":"a","ab":1}', '{"c":1,"x":[]}']
    generator = random.Random(seed)
    admitted = 0
    for _ in range(12):
        schema = any_schema(generator, 3)
        language, root = language_of({"json": schema})
        found = [text for text in texts if language.nullable[language.read(root, text.encode())]]
        validator = jsonschema.Draft202012Validator(schema)
        assert [text for text in found if not validator.is_valid(json.loads(text))] == [], json.dumps(schema)
        admitted += len(found)
    assert admitted > 100


def any_schema(generator: random.Random, depth: int) -> dict[str, Any]:
    """Of keywords that speak of each other."""
    leaves: list[dict[str, Any]] = [{}, {"not": {}}, {"minimum": 1}, {"const": 1}, {"enum": [1, "a", None]}]
    leaves += [{"pattern": "^a"}, {"multipleOf": 2}, {"type": ["integer", "string"]}, {"maxItems": 1}, {"maxLength": 1}]
    if depth == 0:
        return generator.choice(leaves)

    def inner() -> dict[str, Any]:
        return any_schema(generator, depth - 1 if generator.random() < 0.7 else 0)

    one = ["not", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "items", "contains"]
    schema: dict[str, Any] = {}
    for keyword in generator.sample([*one, "if", "oneOf", "anyOf", "allOf", "prefixItems", "required", "counts"], 2):
        if keyword == "required":
            schema |= {keyword: generator.sample("abc", 1), "properties": {generator.choice("abc"): inner()}}
            schema |= {"patternProperties": {"^a": inner(), "b$": inner()}}
        elif keyword == "counts":
            schema |= {"maxProperties": 2, "minItems": 1, "propertyNames": {"maxLength": 1}, "maxContains": 1}
        elif keyword == "if":
            schema |= {"if": inner(), "then": inner(), "else": inner()}
        else:
            schema[keyword] = inner() if keyword in one else [inner(), inner()]
    return schema


@pytest.mark.parametrize("bound", [1.7e308, 10**300, 10**40])
def test_bounds_of_hundreds_of_digits_are_refused_at_once(llm: LLM, bound: float) -> None:
    """A pattern of the bound would grow with the square of its digits."""
    schema = {"type": "integer" if isinstance(bound, int) else "number", "minimum": -bound, "maximum": bound}
    with pytest.raises(ValidationError, match="not usable: Failed to generate regex for"):
        run(llm, ["And he said"], [structured(40, json=schema)])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "multipleOf": 4001}, "'multipleOf' with more than 4000 remainders"),
        ({"type": "integer", "multipleOf": 1999, "minimum": 10**6 + 1}, "too many states"),
    ],
    ids=str,
)
def test_numbers_of_unknown_length_are_valid_and_not_guaranteed(llm: LLM, schema: dict[str, Any], why: str) -> None:
    [output] = run(llm, ["And he said"], [structured(40, json=schema)])
    outcome = output.outputs[0].structured
    assert outcome is not None and not outcome.guaranteed and why in outcome.reason
    assert not outcome.complete or is_valid(output.outputs[0].text, {"json": schema})


COUNTS = [
    {"minProperties": least, "maxProperties": most, "required": required}
    for required in ([], ["b"])
    for least in (0, 1, 2, 3)
    for most in (1, 2, 3)
    if least <= most
]


def counted(counts: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": "null"} for name in "abc"}
    return {"type": "object", "properties": properties, "additionalProperties": False, **counts}


def test_properties_are_counted() -> None:
    objects = [dict.fromkeys(names) for size in range(5) for names in itertools.combinations("abcx", size)]
    many = {**counted({"minProperties": 2, "maxProperties": 3}), "properties": {f"p{i}": {} for i in range(300)}}
    for schema in [*map(counted, COUNTS), many]:
        language, root = language_of({"json": schema})
        validator = jsonschema.Draft202012Validator(schema)
        for item in [*objects, *({f"p{i}": i for i in range(count)} for count in range(5))]:
            text = json.dumps(item, separators=(",", ":")).encode()
            assert language.nullable[language.read(root, text)] == validator.is_valid(item), (schema, item)


def test_a_number_of_properties_is_kept_and_guaranteed(llm: LLM) -> None:
    """Or refused where further properties may follow, which no grammar can count."""
    schemas = [counted(counts) for counts in COUNTS]
    for budget in (28, 40):
        outputs = run(llm, ["And he said"] * len(schemas), [structured(budget, json=schema) for schema in schemas])
        for schema, output in zip(schemas, outputs, strict=True):
            outcome, text = output.outputs[0].structured, output.outputs[0].text
            assert outcome is not None and outcome.guaranteed and outcome.complete, (schema, outcome)
            assert is_valid(text, {"json": schema})
    with pytest.raises(ValidationError, match="not usable"):
        run(llm, "x", structured(json=counted({"minProperties": 4})))


WHOLE = 2**53 + 1  # the first integer that is no float
NUMBERS: list[tuple[Any, list[str], list[str]]] = [
    ({"enum": [WHOLE, -WHOLE]}, [str(WHOLE), str(-WHOLE)], [str(WHOLE - 1), f"{WHOLE}.0"]),
    ({"const": {"id": [12345678901234567890]}}, ['{"id":[12345678901234567890]}'], ['{"id":[12345678901234567000]}']),
    ({"const": 10**300}, [str(10**300)], [str(10**299)]),
    ({"type": "integer", "minimum": WHOLE, "maximum": WHOLE + 1}, [str(WHOLE), str(WHOLE + 1)], [str(WHOLE - 1)]),
    ({"const": 1.0}, ["1"], ["1.0"]),
    ({"const": -0.0}, ["0"], ["-0.0", "-0"]),
    ({"const": 1e20}, ["1" + 20 * "0"], ["1e20"]),
    ({"const": 1e-7}, ["0.0000001"], ["1e-7", "1e-07"]),
    ({"const": 1.5e300}, ["1.5e+300"], ["15" + 299 * "0"]),
    ({"const": 5e-324}, ["5e-324"], ["0"]),
    ({"type": "array", "items": {"enum": [0.0, 0.5, 1.0]}}, ["[0,0.5,1]", "[]"], ["[0.0]", "[1.0]"]),
    ('{"const": 9007199254740993.0}', [str(WHOLE)], [str(WHOLE - 1)]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"a"', '"ab"'], ['""', '"abc"']),
]


def is_answer(structure: Structure, text: str) -> bool:
    """As llguidance and the language say alike."""
    one = {data[0]: token for token, data in structure.vocabulary.token_bytes.items() if len(data) == 1}
    ids = [one[byte] for byte in text.encode()]
    matcher = structure.matcher()
    read = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert structure.language is None or read == structure.is_complete(ids), text
    return bool(read)


@pytest.mark.parametrize(("schema", "right", "wrong"), NUMBERS, ids=lambda value: str(value)[:40])
def test_numbers_are_written_in_one_way(llm: LLM, schema: Any, right: list[str], wrong: list[str]) -> None:
    structure = compiled(llm, json=schema)
    assert structure.language is not None
    assert all(is_answer(structure, text) for text in right) and not any(is_answer(structure, text) for text in wrong)
    outcome = run(llm, "x", structured(500, json=schema))[0].outputs[0]
    assert outcome.structured is not None and outcome.structured.guaranteed and outcome.structured.complete


@settings(max_examples=40)
@given(value=st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)))
def test_constants_are_the_number_that_was_given(value: float) -> None:
    schema: Any = read_schema({"const": value}, closed=False)
    language, root = language_of({"json": schema})
    text, state = b"", root
    while not language.nullable[state]:
        byte = next(byte for byte in b"-0123456789.e+" if language.step(state, byte) != EMPTY)
        text, state = text + bytes([byte]), language.step(state, byte)
    assert (int if isinstance(value, int) else float)(text) == value and len(text) < 60 and text != b"-0"


def test_a_number_that_the_library_would_change_is_refused(llm: LLM) -> None:
    tags = {"structures": [{"begin": "<f>", "schema": {"const": WHOLE}, "end": "</f>"}], "triggers": ["<f>"]}
    assert is_answer(compiled(llm, structural_tag=tags), f"<f>{WHOLE}</f>")
    assert not is_answer(compiled(llm, structural_tag=tags), f"<f>{WHOLE - 1}</f>")
    refused = {"anyOf": [{"enum": [WHOLE]}, {"type": "string", "pattern": r"^\p{L}$"}]}
    with pytest.raises(ValidationError, match=f"the integer {WHOLE} is no float"):
        compiled(llm, json=refused)
    with pytest.raises(ValidationError, match="1e999 is out of range"):
        compiled(llm, json='{"const": 1e999}')


def test_data_in_a_schema_is_not_taken_for_a_schema() -> None:
    data = {"type": "object", "minProperties": 0, "pattern": r"\d"}
    schema = {"properties": {"const": {"const": data}, "x": {"enum": [data], "default": data}}}
    assert read_schema(schema, closed=True) == schema


A, B = {"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}
CLOSED_A = {"properties": {"a": A}, "additionalProperties": False}
PATTERNS = {"patternProperties": {"^a": A}, "additionalProperties": {"type": "string"}}
HAS_A, HAS_B = {"required": ["a"]}, {"properties": {"b": {"const": 1}}}
COMBINED: list[Any] = [
    {"allOf": [A, B]},
    {"oneOf": [A, B]},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}, **HAS_A}, {"properties": {"a": {"const": "x"}}, **HAS_A}]},
    {"not": {"type": ["string", "integer"]}},
    {"type": "object", "not": HAS_A},
    {"type": "object", "not": HAS_B},
    {"type": "object", "not": {"properties": {"a": {}}, "additionalProperties": False}},
    {"type": "array", "not": {"items": {"type": "integer"}}},
    {"type": "array", "not": {"prefixItems": [{"const": 1}]}},
    {"type": "string", "not": {"pattern": "^a"}},
    {"type": "string", "not": {"enum": ["a", "b"]}, "maxLength": 2},
    {"type": "object", "if": HAS_A, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependencies": {"a": ["b"], "x": HAS_B}},
    {"type": "object", "dependentSchemas": {"a": HAS_B}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    {"type": "object", "propertyNames": {"maxLength": 1, "not": {"const": "b"}}},
    {"type": "object", "patternProperties": {"^a": A, "b$": {"type": "string"}}},
    {"type": "object", "patternProperties": {"^a": A}, "additionalProperties": False},
    {"type": "object", "properties": {"a": B}, "patternProperties": {"^a": A}},
    {"type": "object", "allOf": [{"properties": {"a": {}}, "additionalProperties": False}, HAS_A]},
    {"type": "object", "allOf": [{"additionalProperties": B}, {"additionalProperties": A}]},
    {"type": "object", "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": A}, "minProperties": 2},
    {"type": "object", "allOf": [{"properties": {"a": A}}], "unevaluatedProperties": False},
    {"type": "array", "prefixItems": [A], "unevaluatedItems": False},
    {"type": "array", "contains": {"type": "string"}},
    {"type": "array", "contains": A, "minContains": 2},
    {"type": "array", "contains": A, "maxContains": 1, "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"type": "array", "items": A, "uniqueItems": False},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "number", "multipleOf": 0.25},
    {"type": "integer", "multipleOf": 5, "minimum": -5},
    {"minimum": 1, "minLength": 2, "minItems": 1},
    {"properties": {"a": A, "b": {}}, "not": {"properties": {"a": {}}, "additionalProperties": False}},
    {"properties": {"c": {}}, "not": {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}},
    {"type": "object", "oneOf": [CLOSED_A, {**CLOSED_A, "properties": {"a": A, "b": {}}}, {"required": ["c"]}]},
    {"type": "object", "oneOf": [CLOSED_A, {"additionalProperties": {"type": "integer"}, "maxProperties": 2}]},
    {"type": "object", "not": {"patternProperties": {"^a": A}}},
    {"type": "object", "not": {"patternProperties": {"^a": A}, "additionalProperties": {"const": 1}}},
    {"type": "object", "not": {"propertyNames": {"pattern": "^[ab]$"}}, "maxProperties": 2},
    {"type": "object", "allOf": [PATTERNS, {"patternProperties": {"b$": {}}, "additionalProperties": {"minimum": 1}}]},
    {"type": "object", "allOf": [{"not": PATTERNS}, {"not": CLOSED_A}]},
    {"type": "object", "not": PATTERNS, "maxProperties": 2},
    {"type": "array", "contains": {"type": "string"}, "prefixItems": [A]},
    {"type": "array", "allOf": [{"contains": {"type": "string"}}, {"contains": A, "maxContains": 1}]},
    {"type": "array", "not": {"prefixItems": [A], "items": {"type": "string"}}},
    {"type": "array", "contains": {"type": "string"}, "unevaluatedItems": {"const": 1}},
    {"type": "array", "not": {"prefixItems": [{"const": 1}]}, "unevaluatedItems": {"type": "integer"}},
    {"anyOf": [{"properties": {"a": A}}, {"properties": {"b": {}}}], "unevaluatedProperties": False, "type": "object"},
    {"if": HAS_B, "unevaluatedProperties": False, "type": "object"},
    {"properties": {"a": A}, "not": {"required": ["c"]}, "unevaluatedProperties": False, "type": "object"},
    {"type": "integer", "not": {"multipleOf": 5}},
    {"type": "number", "not": {"multipleOf": 0.25}},
    {"type": "number", "not": {"multipleOf": 3}, "minimum": 1},
    {"type": "number", "multipleOf": 2.5},
    {"type": "integer", "multipleOf": 6, "exclusiveMinimum": 0},
    {"type": ["integer", "string"], "anyOf": [{"multipleOf": 3}, {"multipleOf": 5}], "maxLength": 1},
    {"type": "integer", "multipleOf": 127, "not": {"const": 0}},
    {"not": {"type": "number", "multipleOf": 1}},
    {"allOf": [{"const": [1]}, {"not": {"const": [True]}}]},
    {"type": "object", "properties": {"a": {"const": 1}}, "allOf": [{"properties": {"a": {"const": True}}}]},
    {
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
        "allOf": [{"$ref": "#/$defs/a"}, {"minItems": 1}],
    },
    {"discriminator": {"propertyName": "a"}, "oneOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "object"}}},
]
VALUES: list[Any] = [
    *[None, True, False, "", "a", "b", "ab", "abc", "x1", 0, 1, 2, 5, 6, -1, -5, 10, 10**17],
    *[0.5, 1.5, -1.5, -1.75, 2.2, 2.25, 2.75, 0.05, 1000.25, [], [1], [2], [1, 1], [1, "a"], ["a"], [[]], [[[]]]],
    *[[1, 2], [True], [True, False], [1, 2, "a"], [-1, 1], [-1, 1, 2], ["a", "a"], {}, {"a": 1}, {"a": 7}, {"a": "x"}],
    *[{"b": 1}, {"b": 2}, {"a": 1, "b": 1}, {"a": 1, "b": "x"}, {"c": 1}, {"ab": 1}, {"ab": "x"}, {"a": 1, "c": 3}],
    *[{"a": 1, "b": 1, "c": 1}, {"x": 1}, {"b": "x"}, {"a": "x", "c": "x"}, {"a": 1, "c": "x"}],
    *[
        3,
        -3,
        4,
        12,
        127,
        254,
        0.3,
        0.6,
        0.9,
        1.2,
        30,
        3.3,
        ["a", 1],
        ["a", 1, 1],
        [1, "a", "b"],
        [-1, "a"],
        [1, 1, 1],
    ],
]


@pytest.mark.parametrize("schema", COMBINED, ids=lambda schema: json.dumps(schema)[:60])
def test_combined_schemas_admit_what_the_standard_says(schema: Any) -> None:
    """Some order of the properties is an answer where the value is valid, and none is where it is not."""
    language, root = language_of({"json": schema})
    validator = jsonschema.Draft202012Validator(schema)
    found = []
    for value in VALUES:
        orders = map(dict, itertools.permutations(value.items())) if isinstance(value, dict) else [value]
        texts = [json.dumps(each, separators=(",", ":")).encode() for each in orders]
        found.append(any(language.nullable[language.read(root, text)] for text in texts))
    draft7 = {"dependencies": jsonschema.Draft7Validator(schema)}
    right = next((each for keyword, each in draft7.items() if keyword in schema), validator)
    assert found == [right.is_valid(value) for value in VALUES]
    assert any(found) and not all(found)


FORMATTED = {
    "date": (["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "2024-1-1"]),
    "date-time": (["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.5+01:00"], ["2024-02-29", "2024-02-29T24:00:00Z"]),
    "time": (["12:00:00Z"], ["25:00:00Z"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "email": (["a.b@example.org"], ["a@", "a@b@c.d", ".a@b.c"]),
    "ipv4": (["127.0.0.1"], ["256.1.1.1", "1.1.1"]),
    "ipv6": (["::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1::2::3", "12345::"]),
    "duration": (["P1DT2H", "PT5M", "P2W"], ["P", "PT", "1D"]),
    "uri": (["https://a.b/c?d#e"], ["a b", "/c"]),
    "of my own": (["anything"], []),
}


@pytest.mark.parametrize("name", FORMATTED)
def test_formats(name: str) -> None:
    language, root = language_of({"json": {"type": "string", "format": name}})
    for text in itertools.chain(*FORMATTED[name]):
        state = language.read(root, json.dumps(text).encode())
        assert language.nullable[state] == (text in FORMATTED[name][0]), text


def test_items_that_may_repeat_are_said(llm: LLM) -> None:
    class Tags(pydantic.BaseModel):
        tags: set[str] = pydantic.Field(min_length=1)

    output = run(llm, "x", structured(60, json=Tags))[0]
    outcome = output.outputs[0].structured
    assert outcome is not None and outcome.complete and not outcome.guaranteed and "uniqueItems" in outcome.reason
    assert isinstance(output.parsed, Tags)


REPEATS = st.recursive(
    st.sampled_from(["a", "[ab]", "b?", "(ab)?"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["{0,2}", "{0,3}", "{1,3}", "{2,}", "*"])).map(lambda p: f"({p[0]}){p[1]}"),
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(pattern=REPEATS, text=st.text(alphabet="abc", max_size=9))
def test_leaving_out_contained_alternatives_changes_no_language(pattern: str, text: str) -> None:
    language, root = language_of({"regex": pattern})
    plain = Language()
    plain._without_contained = lambda nodes: nodes  # type: ignore[method-assign]
    other = regex(plain, pattern)
    plain.close()
    state, expected = root, other
    for byte in text.encode():
        state, expected = language.step(state, byte), plain.step(expected, byte)
        assert language.needs[state] == plain.needs[expected] and language.nullable[state] == plain.nullable[expected]


def test_nested_repetitions_have_few_states() -> None:
    for pattern in (r"(.{0,200}\n?){0,50}", "(([ab]{0,50}c?){0,50}d?){0,50}"):
        language, root = language_of({"regex": pattern})
        state = language.read(root, b"abacabdabcdabbbbacabda" * 9)
        assert state != EMPTY and len(language.kinds) < 3000


@given(words=st.sets(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=12), text=st.text("ab"))
def test_tries_hold_exactly_their_words(words: set[str], text: str) -> None:
    language = Language()
    root = language.words(word.encode() for word in words)
    for candidate in {*words, text}:
        assert language.nullable[language.read(root, candidate.encode())] == (candidate in words)
    assert language.needs[root] == min(len(word.encode()) for word in words)
