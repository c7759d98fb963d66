"""What vLLM 0.32 answered on the same weights, prompts and params: the same tokens, logprobs, ranks, reasons, refusals.

The answers were recorded once (tests/fixtures/make_vllm_fixtures.py). Differences kept on purpose are listed here, each
with its reason; everything else must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints.vllm import VLLM_MODELS, W8A8, fingerprint, fixture, same_fingerprint, write_vllm_checkpoint
from embedded import open_llm

from llm import LLM, LLMError, RequestOutput, SamplingParams, StructuredOutputsParams

TOLERANCE = 1e-4
DEFAULTS = {"temperature": 0.0, "max_tokens": 12, "logprobs": 5}
# Where vLLM refuses and we do not, and why.
ALLOWED_HERE = {
    "n_greedy": "greedy n > 1 gives n equal outputs",
    "logprobs_too_many": "max_logprobs has no limit by default",
}


def sampling_params(recorded: dict[str, Any]) -> SamplingParams:
    fields = {**DEFAULTS, **recorded}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return SamplingParams(**fields)


@pytest.fixture(scope="module", params=VLLM_MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LLM]]:
    folder = write_vllm_checkpoint(request.param, tmp_path_factory.mktemp("vllm") / request.param)
    assert same_fingerprint(fingerprint(folder), fixture(request.param)["fingerprint"]), "these are other weights"
    with open_llm(folder, max_model_len=256) as llm:
        yield request.param, llm


def cases(kind: str) -> list[str]:
    return list(fixture("llama")[kind])


def difference(ours: RequestOutput, recorded: dict[str, Any]) -> str:
    """What differs first, "" when nothing does."""
    if ours.prompt_token_ids != recorded["prompt_token_ids"]:
        return "prompt_token_ids"
    if len(ours.outputs) != len(recorded["outputs"]):
        return "n"
    for completion, theirs in zip(ours.outputs, recorded["outputs"], strict=True):
        for name in ("token_ids", "finish_reason", "stop_reason"):
            if getattr(completion, name) != theirs[name]:
                return f"{name}: {getattr(completion, name)!r}, vLLM {theirs[name]!r}"
        # vLLM leaves out the bytes of a character that the last token did not complete.
        if completion.text.rstrip("\ufffd") != theirs["text"].rstrip("\ufffd"):
            return f"text: {completion.text!r}, vLLM {theirs['text']!r}"
        found = _positions_difference(completion.logprobs, theirs["logprobs"])
        if found:
            return f"logprobs: {found}"
        ours_sum, their_sum = completion.cumulative_logprob, theirs["cumulative_logprob"]
        if (ours_sum is None) != (their_sum is None):
            return "cumulative_logprob"
        if ours_sum is not None and abs(ours_sum - their_sum) > TOLERANCE * len(theirs["logprobs"]):
            return "cumulative_logprob"
    found = _positions_difference(ours.prompt_logprobs, recorded.get("prompt_logprobs"))
    return f"prompt_logprobs: {found}" if found else ""


def _positions_difference(ours: Any, theirs: Any) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else "one has none"
    if len(ours) != len(theirs):
        return f"{len(ours)} positions, vLLM {len(theirs)}"
    for index, (position, recorded) in enumerate(zip(ours, theirs, strict=True)):
        if position is None or recorded is None:
            if position is not recorded:
                return f"position {index}: one has none"
            continue
        # Ids as a set but for the first: of two tokens closer than the tolerance either may come first.
        expected = {token: (logprob, rank) for token, logprob, rank, _ in recorded}
        if set(position) != set(expected) or next(iter(position)) != recorded[0][0]:
            return f"position {index}: ids {list(position)}, vLLM {[item[0] for item in recorded]}"
        for token, (logprob, rank) in expected.items():
            if abs(position[token].logprob - logprob) > TOLERANCE or position[token].rank != rank:
                return f"position {index}, token {token}: {position[token]}, vLLM {logprob}, rank {rank}"
    return ""


@pytest.mark.parametrize("case", cases("cases"))
def test_as_vllm(model: tuple[str, LLM], case: str) -> None:
    name, llm = model
    recorded = fixture(name)["cases"][case]
    outputs = llm.generate(fixture(name)["prompts"], sampling_params(recorded["params"]), use_tqdm=False)
    differences = [difference(ours, theirs) for ours, theirs in zip(outputs, recorded["outputs"], strict=True)]
    assert not any(differences), differences


def test_a_planted_difference_is_found(model: tuple[str, LLM]) -> None:
    """The negative control: each thing that is compared, changed a little in the recording."""
    name, llm = model
    recorded = fixture(name)["cases"]["greedy"]["outputs"][0]
    ours = llm.generate(fixture(name)["prompts"][0], sampling_params({}), use_tqdm=False)[0]
    assert not difference(ours, recorded)
    for path, value in (
        (("prompt_token_ids", 0), 2),
        (("outputs", 0, "token_ids", -1), 3),
        (("outputs", 0, "finish_reason"), "stop"),
        (("outputs", 0, "stop_reason"), 3),
        (("outputs", 0, "text"), "x"),
        (("outputs", 0, "logprobs", 3, 1, 1), recorded["outputs"][0]["logprobs"][3][1][1] + 2 * TOLERANCE),
        (("outputs", 0, "logprobs", 3, 1, 2), 4),
        (("outputs", 0, "cumulative_logprob"), 0.0),
    ):
        changed = json.loads(json.dumps(recorded))
        target = changed
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        assert difference(ours, changed), path


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("case", cases("errors"))
def test_refused_as_vllm_does(model: tuple[str, LLM], case: str) -> None:
    recorded = fixture("llama")["errors"][case]
    assert recorded["types"][0] == "VLLMValidationError"
    if case in ALLOWED_HERE:
        model[1].generate("x", sampling_params(recorded["params"]), use_tqdm=False)
        return
    with pytest.raises(ValueError) as error:
        model[1].generate("x", sampling_params(recorded["params"]), use_tqdm=False)
    assert isinstance(error.value, LLMError)
    assert error.value.parameter in recorded["params"]
    assert recorded["parameter"] in (None, error.value.parameter)


def test_the_quantized_checkpoint_is_rebuilt(tmp_path: Path) -> None:
    """The recorded answers of `W8A8` are about the checkpoint that `write_vllm_checkpoint` writes."""
    prints = fingerprint(write_vllm_checkpoint(W8A8, tmp_path / "model"))
    assert same_fingerprint(prints, fixture(W8A8)["fingerprint"])
    name = "model.layers.0.mlp.down_proj.weight"
    # A step or two of an int8 weight may hang on a last bit of a scale; ten cannot.
    planted = {**prints, name: [prints[name][0] + 10.0, *prints[name][1:]]}
    assert not same_fingerprint(planted, fixture(W8A8)["fingerprint"])
