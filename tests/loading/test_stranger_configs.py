"""Numbers and patterns of strangers' configs: refused before they cost time or memory."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import copy_model, open_llm

from llm import SamplingParams
from llm.errors import LLMError
from llm.quantization.description import matches

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be an integer from 1 to 10000"),
        ({"num_hidden_layers": 9999}, "9999 layers, and the checkpoint holds"),
        ({"rms_norm_eps": INFINITE}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, must be a number above 0"),
        ({"rope_theta": 0, "rope_parameters": None}, "rope_theta is 0"),
        ({"vocab_size": 2**63}, "vocab_size is 9223372036854775808"),
        ({"architectures": 7}, "architectures is 7"),
        ({"eos_token_id": -5}, "eos_token_id is -5"),
        ({"\x1b[31m" * 99: 1}, "keys that are not understood"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "faktor": 3}},
            "json, rope_scaling has keys .* 'faktor'; .* pass rope_scaling without them in hf_overrides",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "json, rope_scaling has no factor, which is needed"),
        ({"rope_parameters": {"rope_theta": 0}}, "json, rope_parameters: rope_theta is 0"),
        ({"hidden_size": None}, "json has no hidden_size, which llama models need"),
    ],
    ids=str,
)
def test_what_no_model_has_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(LLMError, match=says) as caught, open_llm(copy_model(tmp_path / "model", config=changes)):
        pass
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


NAME = "model.layers.10.self_attn.qkv_proj"
ENDLESS = (
    r"(.+)+!$",
    r"(?:.*)*",
    r"(a|b)*c",
    r"(a?)*",
    ".?" * 40,
    "(.|.)" * 40,
    ".*" * 9 + "!",
    "(" * 5000,
    "[",
    r"((.)+x?){9}",
)
PUBLISHED = (
    ".*lm_head",
    r"model\.layers\.\d+\.(self_attn|mlp)\..*",
    "^(?!.*(?:gate|up)).*$",
    ".*a.*b.*(d|e)_proj.*",
)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_never_end_are_refused_at_once(pattern: str) -> None:
    started = time.thread_time()
    with pytest.raises(LLMError, match="the pattern re:"):
        matches(NAME, f"re:{pattern}")
    assert time.thread_time() - started < 1


def test_patterns_of_published_checkpoints_match() -> None:
    assert [matches(NAME, f"re:{pattern}") for pattern in PUBLISHED] == [False, True, True, False]


def test_lists_of_a_request_are_bounded() -> None:
    for endless in (range(10**9), itertools.count()):
        with pytest.raises(LLMError, match="stop_token_ids must be a list of token ids"):
            SamplingParams(stop_token_ids=endless)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[5]).stop_token_ids == [5]


def test_extra_args_that_hold_themselves_are_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = [loop]
    shared: list[Any] = []
    for _ in range(100):  # 2**100 values, each of them counted
        shared = [shared, shared]
    for endless in (loop, {"a": shared}):
        with pytest.raises(LLMError, match=r"^extra_args are .*, or hold themselves; pass plain data\.$"):
            SamplingParams(extra_args=endless)
    params = SamplingParams(extra_args={"a": [1]})
    params.extra_args = loop
    for copy in (params.clone, params.copy_validated):
        with pytest.raises(LLMError, match="hold themselves"):
            copy()


def test_token_ids_beyond_the_vocabulary_are_one_sentence() -> None:
    with open_llm(max_model_len=64) as llm:
        for fields in ({"stop_token_ids": [2**40]}, {"allowed_token_ids": [2**63]}, {"logit_bias": {10**30: 1.0}}):
            [name] = fields
            with pytest.raises(LLMError, match=rf"^{name} must be below the vocabulary size \d+, got \d+\.$"):
                llm.generate("x", SamplingParams(**fields), use_tqdm=False)


@pytest.mark.parametrize("name", ["top_k", "seed", "n", "temperature", "max_tokens", "logprobs"])
def test_a_tensor_in_a_scalar_field_is_refused(name: str) -> None:
    with pytest.raises(LLMError, match=rf"{name} must be .*, got tensor"):
        SamplingParams(**{name: torch.tensor([1, 2])})
