"""SamplingParams: every range, what is normalised, and copies that share nothing that can change."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from llm.errors import LLMError, ValidationError
from llm.pooling_params import PoolerConfig, PoolingParams
from llm.sampling_params import (
    MAX_N,
    MAX_SEED,
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

# What no field takes for a number.
NOT_NUMBERS = ["1", None, [1], True, 1 + 0j, math.nan, math.inf, -math.inf]
FLAGS = [
    "flat_logprobs",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
]

GOOD: dict[str, list[Any]] = {
    "n": [1, 2, MAX_N, np.int64(3)],
    "max_tokens": [None, 1, 10**30, np.int32(7)],
    "min_tokens": [0, 1, 10**30],
    "temperature": [0, 0.0, 1e-9, 0.01, 1, 2, 2.0, np.float32(0.5), Fraction(1, 2)],
    "top_k": [-1, 0, 1, 50, 10**30, np.int64(40)],
    "top_p": [5e-324, 0.5, 1, 1.0, np.float64(0.9)],
    "min_p": [0, 0.0, 0.5, 1, 1.0],
    "seed": [None, -1, 0, 1, MAX_SEED, np.uint64(MAX_SEED)],
    "stop": [None, [], "x", ["x", "\n"], ("x",), {"x"}],
    "stop_token_ids": [None, [], [0, 5], (5,), {5}, np.array([5, 6])],
    "logprobs": [None, -1, 0, 20, True, 10**30],
    "output_kind": list(RequestOutputKind),
    "extra_args": [None, {}, {"x": object()}],
    "presence_penalty": [-2, 0, 2.0, np.float32(0.5)],
    "frequency_penalty": [-2, 0, 2.0, np.float32(0.5)],
    "repetition_penalty": [5e-324, 0.5, 1, 1.2, 1e300],
    "prompt_logprobs": [None, -1, 0, 20, True, 10**30],
    "prompt_logprob_token_ids": [None, [[0]], [[5, -1], []], (np.array([5, 6]),), np.array([[1, 2], [3, 4]])],
    "prompt_logprob_start": [None],
    "logprob_token_ids": [None, [0], [5, 3], (5,), np.array([5, 6]), list(range(128))],
    "structured_outputs": [None, StructuredOutputsParams(regex="a+"), StructuredOutputsParams(json={})],
    "logit_bias": [None, {}, {0: 1.0, 5: -100}, {5: -math.inf}, {np.int64(5): np.float32(1)}],
    "allowed_token_ids": [None, [0], (5,), {5, 6}, np.array([5, 6])],
    "bad_words": [None, [], ["x", " y"], ("x",)],
    "skip_reading_prefix_cache": [None, True, False],
    "thinking_token_budget": [None, -1, 0, 500],
    "repetition_detection": [None, RepetitionDetectionParams(), RepetitionDetectionParams(4, 1, 3)],
    "logits_processors": [None, [], [lambda output, logits: logits], (max,)],
    "truncate_prompt_tokens": [None, -1, 1, 10**30],
    **{flag: [True, False] for flag in FLAGS},
}

BAD: dict[str, list[Any]] = {
    "n": [0, -1, MAX_N + 1, 1.0, *NOT_NUMBERS],
    "max_tokens": [0, -1, 1.0, *(value for value in NOT_NUMBERS if value is not None)],
    "min_tokens": [-1, 1.0, *NOT_NUMBERS],
    "temperature": [-1e-9, 2.0001, 10**400, *NOT_NUMBERS],
    "top_k": [-2, 1.0, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.1, 1.0001, *NOT_NUMBERS],
    "min_p": [-1e-9, 1.0001, *NOT_NUMBERS],
    "seed": [-2, MAX_SEED + 1, 0.5, *(value for value in NOT_NUMBERS if value is not None)],
    "stop": ["", [""], ["x", ""], [5], 5, 0, b"x", [b"x"], {"x": 1}, [None], True],
    "stop_token_ids": [0, 5, [-1], [1.0], ["1"], "1", [[1]], [True], [1, True], [None], {1: 2}, True],
    "logprobs": [-2, 1.0, False, *(value for value in NOT_NUMBERS if value not in (None, True))],
    "output_kind": [0, "FINAL_ONLY", None],
    "extra_args": [[], "x", 5, [("x", 1)]],
    "presence_penalty": [-2.0001, 2.0001, *NOT_NUMBERS],
    "frequency_penalty": [-2.0001, 2.0001, *NOT_NUMBERS],
    "repetition_penalty": [0, -1.0, 10**400, *NOT_NUMBERS],
    "prompt_logprobs": [-2, 1.0, False, *(value for value in NOT_NUMBERS if value not in (None, True))],
    "prompt_logprob_token_ids": [[], [[]], [1], [[-2]], [[1.0]], [["1"]], "1", 5, {1: 2}],
    "prompt_logprob_start": [0, *(value for value in NOT_NUMBERS if value is not None)],
    "logprob_token_ids": [[], [-1], [1.0], "1", 5, {1: 2}, [True], list(range(129))],
    "structured_outputs": [{}, "json", {"regex": "a"}],
    "logit_bias": [
        *([1], 5, {-1: 1.0}, {"1": 1.0}, {1: "1"}),
        *({1: math.nan}, {1: math.inf}, {1: -(10**400)}, {True: 1.0}, {1: True}),
    ],
    "allowed_token_ids": [[], [-1], [1.0], "1", 5, {1: 2}, [True]],
    "bad_words": ["x", [""], ["x", 5], 5, {"x": 1}, [None], [["a"]], [{}]],
    "skip_reading_prefix_cache": [0, 1, "yes"],
    "thinking_token_budget": [-2, 1.5, True, "4"],
    "repetition_detection": [5, {"min_count": 3}],
    "logits_processors": [5, "x", ["x"], [int], [None], {"x": 1}],
    "truncate_prompt_tokens": [0, -2, 1.0, True, "1", np.ones(2)],
    **{flag: [0, 1, None, "yes"] for flag in FLAGS},
}
# Of no dimensions: it has a length that raises, and compares to a tensor.
BAD = {name: [*values, torch.tensor(1)] for name, values in BAD.items()}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    """One per value, under a name that is the same in every process: without addresses."""
    shown = {name: [re.sub(" at 0x.*", "", repr(value))[:30] for value in values] for name, values in table.items()}
    return [
        pytest.param(name, value, id=f"{name}={text}")
        for name in table
        for value, text in zip(table[name], shown[name], strict=True)
    ]


def refused(name: str, **fields: Any) -> ValidationError:
    """Construct, which must fail over this field with one printable sentence that says what would be right."""
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    error = caught.value
    assert isinstance(error, ValueError) and isinstance(error, LLMError)
    assert error.parameter == name
    message = str(error)
    assert message.startswith(f"{name} must be ") and message.endswith(".") and message.isprintable()
    assert ", got " in message
    return error


def test_every_field_is_in_both_tables() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == set(GOOD) == set(BAD)


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_values_in_range_are_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value}).validate()


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    error = refused(name, **{name: value})
    candidates = [value, *(value if isinstance(value, list) else [])]
    candidates += [*value, *value.values()] if isinstance(value, dict) else []
    candidates += [item for row in candidates if isinstance(row, list) for item in row]
    assert any(error.value is candidate or error.value == candidate for candidate in candidates)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("min_tokens", {"min_tokens": 3, "max_tokens": 2}),
        ("stop", {"stop": "x", "detokenize": False}),
        ("logprobs", {"logprobs": 1, "logprob_token_ids": [3, 5]}),
        ("skip_reading_prefix_cache", {"skip_reading_prefix_cache": False, "prompt_logprobs": 0}),
    ],
)
def test_fields_that_contradict_each_other_are_refused(name: str, fields: dict[str, Any]) -> None:
    refused(name, **fields)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_defaults() -> None:
    params = SamplingParams()
    assert params.max_tokens is None
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.min_tokens, params.seed, params.logprobs, params.extra_args) == (0, None, None, None)
    assert (params.stop, params.stop_strings, params.stop_token_ids) == ([], [], [])
    assert [getattr(params, flag) for flag in FLAGS] == [False, False, True, True, True, False]
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert repr(params) == str(params) == "SamplingParams()"


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("stop", "x", ["x"]),
        ("stop", ("x", "y"), ["x", "y"]),
        ("stop", None, []),
        ("stop_token_ids", None, []),
        ("stop_token_ids", (5, 4, 5), [5, 4]),
        ("stop_token_ids", np.array([5, 4, 5]), [5, 4]),
        ("seed", -1, None),
        ("seed", np.int64(7), 7),
        ("top_k", -1, 0),
        ("logprobs", True, 1),
        ("logprobs", -1, -1),
        ("prompt_logprobs", True, 1),
        ("bad_words", None, []),
        ("bad_words", ("x", "y", "x"), ["x", "y"]),
        ("allowed_token_ids", np.array([5, 4]), [5, 4]),
        ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
        ("temperature", Fraction(1, 2), 0.5),
    ],
)
def test_normalisation(name: str, given: Any, stored: Any) -> None:
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == stored
    assert type(value) is type(stored)
    if isinstance(value, list):
        assert [type(item) for item in value] == [type(item) for item in stored]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy_begins_below_a_hundred_thousandth(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def everything_set() -> SamplingParams:
    """No field at its default, so that a clone that forgets one is seen."""
    params = SamplingParams(
        n=2,
        max_tokens=9,
        min_tokens=1,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.5,
        seed=5,
        stop=["x"],
        stop_token_ids=[1],
        ignore_eos=True,
        logprobs=2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        prompt_logprobs=3,
        prompt_logprob_token_ids=[[1]],
        prompt_logprob_start=1,
        logprob_token_ids=[4, 5],
        flat_logprobs=True,
        spaces_between_special_tokens=False,
        structured_outputs=StructuredOutputsParams(choice=["a"]),
        logit_bias={3: 1.0},
        allowed_token_ids=[3, 4],
        bad_words=["w"],
        skip_reading_prefix_cache=True,
        thinking_token_budget=4,
        repetition_detection=RepetitionDetectionParams(3, 1, 2),
        logits_processors=[max],
        truncate_prompt_tokens=8,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"list": [[1]], "dict": {"k": [2]}, "object": object()},
    )
    same = [field.name for field in dataclasses.fields(params) if getattr(params, field.name) == field.default]
    assert same == ["detokenize"]  # stop strings need it
    return params


def test_a_clone_is_equal_and_shares_no_container() -> None:
    params = everything_set()
    before = copy.copy(params)
    assert params.extra_args is not None
    before.extra_args = {"list": [[1]], "dict": {"k": [2]}, "object": params.extra_args["object"]}
    for clone in (params.clone(), params.copy_validated()):
        assert clone == params and clone is not params
    clone = params.clone()
    assert clone.extra_args is not None and isinstance(clone.stop, list) and clone.stop_token_ids is not None
    clone.stop.append("y")
    clone.stop_token_ids.append(7)
    clone.extra_args["list"][0].append(3)
    clone.extra_args["dict"]["k"].append(3)
    clone.extra_args["new"] = 1
    before.stop, before.stop_token_ids = ["x"], [1]
    assert params == before
    # What is no list and no dict is the caller's own object: a lock or a tokenizer cannot be copied.
    assert clone.extra_args["object"] is params.extra_args["object"]


def test_construction_and_cloning_leave_the_callers_lists_alone() -> None:
    stop, stop_token_ids, extra_args = ["x"], [5, 5], {"k": [1]}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, extra_args=extra_args)
    params.clone()
    assert (stop, stop_token_ids, extra_args) == (["x"], [5, 5], {"k": [1]})
    assert params.stop is not stop and params.stop_token_ids is not stop_token_ids


def test_a_clone_is_validated_again_for_the_object_is_mutable() -> None:
    params = SamplingParams()
    params.temperature = 3.0
    for check in (params.validate, params.clone):
        with pytest.raises(ValidationError, match="temperature must be"):
            check()
    params = SamplingParams()
    params.stop = "late"
    assert params.clone().stop_strings == ["late"]
    assert params.stop == "late"


def test_a_copy_of_validated_params_has_extra_args_and_origins_of_its_own() -> None:
    params = everything_set()
    copied = params.copy_validated()
    assert copied.extra_args is not None and params.extra_args is not None
    copied.extra_args["new"] = 1
    copied.set_from("elsewhere", seed=9)
    assert "new" not in params.extra_args
    assert (params.seed, params.origins["seed"]) == (5, "given")


def test_the_repr_is_a_call_that_makes_an_equal_object() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: -1.0}, min_tokens=2)
    assert repr(params) == "SamplingParams(temperature=0.5, stop=['x'], min_tokens=2, logit_bias={3: -1.0})"
    assert eval(repr(params)) == params


def test_origins_say_where_each_value_came_from() -> None:
    params = SamplingParams(top_k=5)
    params.set_from("a file", temperature=0.7, min_p=0.1)
    params.min_p = 0.2  # no longer the file's
    origins = params.clone().origins
    assert {name: origins[name] for name in ("top_k", "temperature", "min_p", "top_p", "stop")} == {
        "top_k": "given",
        "temperature": "a file",
        "min_p": "given",
        "top_p": "default",
        "stop": "default",
    }
    assert str(params).splitlines() == [
        "temperature              0.7  (a file)",
        "top_k                    5  (given)",
        "min_p                    0.2  (given)",
    ]


def test_from_optional_takes_none_for_what_was_not_said_and_openais_bias() -> None:
    params = SamplingParams.from_optional(temperature=None, max_tokens=None, top_p=0.5, logit_bias={"3": 500, 4: -1.5})
    assert params == SamplingParams(top_p=0.5, logit_bias={3: 100.0, 4: -1.5})


class NotComparable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


STRANGE: list[Any] = [
    *(None, True, 0, -1, 2**70, 10**400, 1.5, math.nan, -math.inf, 1j, "", "a", "\ud83d", b"a", object(), int, ...),
    *([], ["a"], [["a"]], [[]], [{}], [None], [True], [2**70], [b"a"], (1,), {1}, range(3), {}, {"a": 1}, {1: "a"}),
    *({"1": 1.0}, {1: None}, {(1,): 1}, {1: {}}, {"1" * 5000: 1.0}, np.int64(3), np.float32(1), np.array([1, 2])),
    *(np.array([[1]]), torch.tensor(3), torch.tensor([[1.0]]), [np.array([1, 2])], NotComparable(), [NotComparable()]),
]
NEEDED: dict[type, dict[str, Any]] = {
    SamplingParams: {},
    RepetitionDetectionParams: {},
    BeamSearchParams: {"beam_width": 2, "max_tokens": 3},
    PoolingParams: {},
    PoolerConfig: {},
}


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.__name__)
def test_whatever_a_field_is_set_to_is_taken_or_refused_in_a_sentence(kind: Any) -> None:
    """By the constructor, and by whoever validates again what was set later."""

    def later(name: str, value: object) -> None:
        params = kind(**NEEDED[kind])
        setattr(params, name, value)
        params.validate()

    ways: list[Callable[[str, object], object]] = [lambda name, value: kind(**{**NEEDED[kind], name: value})]
    ways += [later] if hasattr(kind, "validate") else []
    if kind is SamplingParams:
        ways.append(lambda name, value: SamplingParams.from_optional(**{name: value}))
    for field in dataclasses.fields(kind):
        for value in STRANGE:
            for way in ways:
                with contextlib.suppress(ValidationError):
                    way(field.name, value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("max_pattern_size", {"max_pattern_size": -1}),
        ("min_pattern_size", {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}),
        ("min_count", {"max_pattern_size": 2, "min_count": 1}),
    ],
)
def test_repetition_detection_has_ranges_too(name: str, fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=name) as caught:
        RepetitionDetectionParams(**fields)
    assert caught.value.parameter == name


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json": {}}, {"json_object": True, "choice": ["a"]}])
def test_structured_outputs_take_exactly_one_constraint(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one") as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.parameter == "structured_outputs"
