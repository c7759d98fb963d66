"""`LLM.generate(checkpoint=...)`: a call that goes on where an earlier one was ended."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import assert_idle, engine_of, open_llm
from same_answers import CACHE, Answer, same

from llm import LLM, GenerationInterrupted, SamplingParams, ValidationError
from llm.errors import EmptyPromptError, JobError
from llm.outputs import RequestOutputs

PROMPTS = [f"In the year {index}" for index in range(8)]
PARAMS = [
    SamplingParams(max_tokens=3 + index, ignore_eos=True, n=1 + (index == 2), logprobs=1 if index == 4 else None)
    for index in range(8)
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, max_num_seqs=3, **CACHE) as llm:
        yield llm


def call(llm: LLM, path: Path | None, prompts: Any = PROMPTS, params: Any = PARAMS, **options: Any) -> RequestOutputs:
    if path is None:
        llm._preprocessor._call_numbers = itertools.count()
    outputs = llm.generate(prompts, params, use_tqdm=False, checkpoint=path, **options)
    assert_idle(llm)
    return outputs


def assert_same(expected: RequestOutputs, found: RequestOutputs) -> None:
    def facts(outputs: RequestOutputs) -> list[Any]:
        return [
            (output.index, output.prompt, output.seed, [(own.text, own.finish_reason) for own in output.outputs])
            for output in outputs
        ]

    def scored(outputs: RequestOutputs) -> list[Answer]:
        return [(own.token_ids, own.logprobs) for output in outputs for own in output.outputs]

    assert facts(found) == facts(expected) and same(scored(found), scored(expected))


def interrupt(llm: LLM, path: Path, step: int) -> None:
    runner = engine_of(llm).runner
    execute, steps = runner.execute, []

    def hooked(plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == step:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    runner.execute = hooked
    try:
        with pytest.raises(GenerationInterrupted):
            call(llm, path)
    finally:
        del runner.execute


def test_a_call_goes_on_where_it_was_interrupted(llm: LLM, tmp_path: Path, ctrl_c: None) -> None:
    whole, stats = call(llm, None), engine_of(llm).stats
    for step in (1, 4, 9):
        path = tmp_path / f"{step}.ckpt"
        before = stats.generated_tokens
        interrupt(llm, path, step)
        told: list[Any] = []
        assert_same(whole, call(llm, path, on_output=told.append))
        assert sorted(output.index for output in told) == list(range(8))
        drawn = stats.generated_tokens - before
        again = drawn - sum(len(own.token_ids) for output in whole for own in output.outputs)
        assert 0 <= again <= 7 + 1  # row 4 has logprobs and starts again, an ended one of two draws its end again
        before = stats.steps
        assert_same(whole, call(llm, path))
        assert stats.steps == before


def test_rows_are_found_by_what_they_are(llm: LLM, tmp_path: Path) -> None:
    path, stats = tmp_path / "run.ckpt", engine_of(llm).stats
    params = [SamplingParams(max_tokens=4, seed=index) for index in range(8)]
    first = call(llm, path, PROMPTS[:4], params[:4])
    before = stats.generated_tokens
    order = [5, 3, 0]
    second = call(llm, path, [PROMPTS[index] for index in order], [params[index] for index in order])
    assert stats.generated_tokens - before == len(second[0].outputs[0].token_ids)
    assert [output.outputs for output in second[1:]] == [first[3].outputs, first[0].outputs]
    assert [output.index for output in second] == [0, 1, 2]
    bad = call(llm, path, [PROMPTS[0], []], params[:2], on_error="return")
    assert bad[0].outputs == first[0].outputs and isinstance(bad[1].error, EmptyPromptError)


def test_what_cannot_be_kept_is_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    call(llm, path, PROMPTS[:1], SamplingParams(max_tokens=1))
    with open_llm(kv_cache_dtype="fp8") as other, pytest.raises(JobError, match="its kv_cache_dtype is"):
        call(other, path)
    with pytest.raises(ValidationError, match=r"logits_processors=.* cannot be recorded"):
        call(llm, path, "And", SamplingParams(max_tokens=1, logits_processors=[lambda ids, logits: logits]))
    with pytest.raises(ValidationError, match="extra_args cannot be recorded"):
        call(llm, path, "And", SamplingParams(max_tokens=1, extra_args={"a": object()}))
    with pytest.raises(ValidationError, match="checkpoint must be the path of a file"):
        call(llm, 3)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="is no folder"):
        call(llm, tmp_path / "no" / "run.ckpt")
    assert len(call(llm, path, PROMPTS[:1], SamplingParams(max_tokens=1))) == 1  # it was closed each time
