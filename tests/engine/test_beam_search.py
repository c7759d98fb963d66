"""`LLM.beam_search` is transformers' beam search: the same sequences with the same scores, whatever the batch.

Random models seldom say EOS, so these tests call every fifth token one: sequences end early, late and not at all.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.vllm import fixture, write_vllm_checkpoint
from embedded import assert_idle, engine_of
from tiny_models import TINY_MODELS, make_prompts, one_thread, reference_model, tiny_checkpoint

from llm import LLM, BeamSearchOutput, BeamSearchParams, GenerationInterrupted, ValidationError
from llm.engine.beams import PromptSearch
from llm.outputs import Logprob

MODELS = ("llama", "gemma3", "gpt2")
EOS = list(range(2, 257, 5))
PROMPTS = make_prompts(TINY_MODELS["llama"])[:4]
CASES: dict[str, dict[str, Any]] = {
    "width 3": {"beam_width": 3, "max_tokens": 10},
    "early": {"beam_width": 3, "max_tokens": 10, "early_stopping": True},
    "never": {"beam_width": 3, "max_tokens": 10, "early_stopping": "never"},
    "no penalty": {"beam_width": 2, "max_tokens": 12, "length_penalty": 0.0, "early_stopping": "never"},
    "long": {"beam_width": 4, "max_tokens": 12, "length_penalty": 2.0},
    "short": {"beam_width": 4, "max_tokens": 9, "length_penalty": -1.0},
    "one token": {"beam_width": 5, "max_tokens": 1},
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    folder = tiny_checkpoint(request.param, tmp_path_factory)
    with one_thread(), LLM(folder, skip_tokenizer_init=True, hf_overrides={"eos_token_id": EOS}, block_size=4) as llm:
        yield folder, llm


@lru_cache
def expected(folder: Path, index: int, case: str) -> list[tuple[list[int], float]]:
    return transformers_beams(folder, PROMPTS[index], BeamSearchParams(**CASES[case]), EOS)


@torch.no_grad()
def transformers_beams(
    folder: Path, prompt: list[int], params: BeamSearchParams, eos: list[int] | None, **more: Any
) -> list[tuple[list[int], float]]:
    """(generated ids with the EOS, score) of each sequence, the best first."""
    found = reference_model(folder).generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    return [
        (_until_eos(row, eos or []), score) for row, score in zip(rows, found.sequences_scores.tolist(), strict=True)
    ]


def _until_eos(tokens: list[int], eos: list[int]) -> list[int]:
    """Without padding: only what follows an EOS is cut, for the padding's id can be generated too."""
    ends = [index for index, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def found(output: BeamSearchOutput, prompt: list[int]) -> list[tuple[list[int], float]]:
    for item in output.sequences:
        assert item.tokens[: len(prompt)] == prompt
        assert item.finish_reason == ("stop" if item.tokens[-1] in EOS else "length")
        assert item.stop_reason == (item.tokens[-1] if item.tokens[-1] in EOS else None)
        assert len(item.logprobs) == len(item.tokens) - len(prompt)
        total = sum(tops[token].logprob for token, tops in zip(item.tokens[len(prompt) :], item.logprobs, strict=True))
        assert item.cum_logprob == pytest.approx(total, abs=1e-6)
    return [(item.tokens[len(prompt) :], item.score) for item in output.sequences]


def differences(ours: list[tuple[list[int], float]], theirs: list[tuple[list[int], float]]) -> list[str]:
    wrong = [f"{a} is not {b}" for (a, _), (b, _) in zip(ours, theirs, strict=True) if a != b]
    return wrong + [
        f"score {a}, not {b}" for (_, a), (_, b) in zip(ours, theirs, strict=True) if abs(a - b) > TOLERANCE
    ]


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(model: tuple[Path, LLM], case: str) -> None:
    folder, llm = model
    params = BeamSearchParams(**CASES[case], include_stop_str_in_output=True)
    outputs = llm.beam_search(PROMPTS, params)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert not differences(found(output, prompt), expected(folder, index, case))
    assert_idle(llm)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_the_cases_end_in_every_way(model: tuple[Path, LLM]) -> None:
    """The negative control: the settings matter on these prompts, so an implementation that ignored one would fail."""
    folder = model[0]
    results = {case: [expected(folder, index, case) for index in range(len(PROMPTS))] for case in CASES}
    sequences = {case: [[tokens for tokens, _ in rows] for rows in result] for case, result in results.items()}
    assert sequences["width 3"] != sequences["early"]
    assert sequences["width 3"] != sequences["never"]
    flat = [tokens for rows in sequences["width 3"] for tokens in rows]
    assert any(tokens[-1] in EOS for tokens in flat) and any(tokens[-1] not in EOS for tokens in flat)
    planted = [(tokens, score + 2 * TOLERANCE) for tokens, score in results["width 3"][0]]
    assert differences(planted, results["width 3"][0])
    assert differences([([*tokens, 1], score) for tokens, score in planted], results["width 3"][0])


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_without_eos(model: tuple[Path, LLM]) -> None:
    folder, llm = model
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ours = [(item.tokens[len(prompt) :], item.score) for item in output.sequences]
        assert not differences(ours, transformers_beams(folder, prompt, params, None))
        assert {item.finish_reason for item in output.sequences} == {"length"}


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_alone_is_batched_and_limited(model: tuple[Path, LLM]) -> None:
    llm = model[1]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    batched = _shown(llm.beam_search(PROMPTS, params))
    assert _shown([llm.beam_search([prompt], params)[0] for prompt in PROMPTS]) == batched
    assert _shown(llm.beam_search(PROMPTS, params, concurrency_limit=3)) == batched
    assert llm.beam_search([], params) == []


def _shown(outputs: list[BeamSearchOutput]) -> list[list[tuple[list[int], float]]]:
    return [[(item.tokens, round(item.score, 4)) for item in output.sequences] for output in outputs]


@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_what_they_have_in_common(caching: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint("llama", tmp_path_factory)
    prompt = make_prompts(TINY_MODELS["llama"])[-1]
    with one_thread(), LLM(folder, skip_tokenizer_init=True, block_size=4, enable_prefix_caching=caching) as llm:
        before = llm.stats().tokens
        llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=8))
        # The prompt once, and per beam and step less than a block and the new token.
        assert llm.stats().tokens - before <= len(prompt) + 4 * 8 * 5
        # A later call shares nothing with it when prefix caching is off.
        assert llm.generate([prompt], use_tqdm=False)[0].num_cached_tokens == (36 if caching else 0)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_allowed_tokens_are_ranked_as_they_are(model: tuple[Path, LLM]) -> None:
    folder, llm = model
    allowed = [11, 21, 31, 41, 53, 64]
    params = BeamSearchParams(beam_width=2, max_tokens=4, allowed_token_ids=allowed, ignore_eos=True)
    output = llm.beam_search([PROMPTS[1]], params)[0]
    ours = [(item.tokens[len(PROMPTS[1]) :], item.score) for item in output.sequences]
    theirs = transformers_beams(folder, PROMPTS[1], params, None, prefix_allowed_tokens_fn=lambda *_: allowed)
    assert not differences(ours, theirs)


def test_an_eos_is_left_out_unless_asked_for() -> None:
    search = PromptSearch(BeamSearchParams(beam_width=1, max_tokens=5), frozenset([7]), 5)
    search.advance([{3: Logprob(-1.0), 7: Logprob(-2.0)}])
    assert not search.done and [beam.tokens for beam in search.running] == [[3]]
    search.advance([{7: Logprob(-0.5), 4: Logprob(-9.0)}])
    assert search.done
    assert [(beam.tokens, beam.cum_logprob, beam.score) for beam in search.ended] == [([3, 7], -1.5, -0.75)]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("ends", [1, 2, 7])
def test_a_search_goes_on_when_every_beam_would_rather_end(width: int, ends: int) -> None:
    """All the likeliest continuations are EOS, as many as there are: still `width` others run on."""
    eos = frozenset(range(ends))
    params = BeamSearchParams(beam_width=width, max_tokens=9, early_stopping="never")
    search = PromptSearch(params, eos, 9)
    for _ in range(3):
        logprobs = {token: Logprob(-1.0 - token / 100 - (9.0 if token >= ends else 0.0)) for token in range(ends + 6)}
        asked = dict(sorted(logprobs.items(), key=lambda item: -item[1].logprob)[: search.num_candidates])
        search.advance([asked] * len(search.running))
        assert len(search.running) == width
        assert not {beam.tokens[-1] for beam in search.running} & eos


def test_as_vllm(tmp_path: Path) -> None:
    """The same sequences as vLLM's, without EOS in reach; its texts and sums."""
    recorded = fixture("llama")
    with one_thread(), LLM(write_vllm_checkpoint("llama", tmp_path / "model"), max_model_len=256) as llm:
        for case in recorded["beam_search"]:
            outputs = llm.beam_search(recorded["prompts"], BeamSearchParams(**case["params"]))
            for output, theirs in zip(outputs, case["outputs"], strict=True):
                assert [item.tokens for item in output.sequences] == [item["tokens"] for item in theirs]
                assert [item.text for item in output.sequences] == [item["text"] for item in theirs]
                sums = [item["cum_logprob"] for item in theirs]
                assert [item.cum_logprob for item in output.sequences] == pytest.approx(sums, abs=1e-3)
                assert output.sequences[0].orig_prompt in recorded["prompts"]


def test_the_defaults_are_those_of_vllm() -> None:
    """And one field more, with transformers' default."""
    params = dict(vars(BeamSearchParams(beam_width=3, max_tokens=4)))
    assert params.pop("early_stopping") is False
    assert params == {
        **{"beam_width": 3, "max_tokens": 4, "ignore_eos": False, "temperature": 0.0, "length_penalty": 1.0},
        **{"include_stop_str_in_output": False, "structured_outputs": None, "skip_special_tokens": True},
        **{"watermarking": None, "allowed_token_ids": None},
    }


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 2.0),
        ("max_tokens", None),
        ("ignore_eos", 1),
        ("temperature", 0.5),
        ("length_penalty", float("nan")),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
        ("watermarking", True),
    ],
)
def test_bad_params(parameter: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=parameter) as error:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, parameter: value})
    assert error.value.parameter == parameter


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_bad_calls(model: tuple[Path, LLM]) -> None:
    llm = model[1]
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    outside = BeamSearchParams(beam_width=2, max_tokens=3, allowed_token_ids=[257])
    for arguments, parameter in (
        (([[]], params), "prompts"),
        (([[3, 999]], params), "prompts"),
        (([[3]], {"beam_width": 2}), "params"),
        (([[3]], outside), "allowed_token_ids"),
        (([[3]], params, None, False, 0), "concurrency_limit"),
        (([[3]], params, None, "yes"), "use_tqdm"),
        (([[3]], params, "adapter"), "lora_request"),
    ):
        with pytest.raises(ValidationError) as error:
            llm.beam_search(*arguments)
        assert error.value.parameter == parameter
    assert_idle(llm)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_an_interruption_hands_back_what_is_done(model: tuple[Path, LLM]) -> None:
    llm = model[1]
    runner = engine_of(llm).runner
    execute, steps = runner.execute, []

    def interrupted(plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == 8:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    runner.execute = interrupted
    try:
        with pytest.raises(GenerationInterrupted) as error:
            llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=6), concurrency_limit=1)
    finally:
        runner.execute = execute
    done = [output is not None for output in error.value.outputs]
    assert done[0] and not done[-1]
    assert_idle(llm)
