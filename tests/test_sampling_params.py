"""SamplingParams: every range, what is normalised, and copies that share nothing that can change."""

from __future__ import annotations

import copy
import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from llm.errors import LLMError, ValidationError
from llm.sampling_params import MAX_N, MAX_SEED, RequestOutputKind, SamplingParams

# What no field takes for a number.
NOT_NUMBERS = ["1", None, [1], True, 1 + 0j, math.nan, math.inf, -math.inf]
FLAGS = ["ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"]

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
    **{flag: [0, 1, None, "yes"] for flag in FLAGS},
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.30}") for name in table for value in table[name]]


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
    assert any(error.value is candidate or error.value == candidate for candidate in candidates)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("min_tokens", {"min_tokens": 3, "max_tokens": 2}),
        ("stop", {"stop": "x", "detokenize": False}),
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
    assert [getattr(params, flag) for flag in FLAGS] == [False, True, True, False]


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
    clone = params.clone()
    assert clone == params and clone is not params
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
