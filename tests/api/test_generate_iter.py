"""`LLM.generate_iter`: the outputs of `generate`, of any iterable, in constant memory; leaving early leaves nothing."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from embedded import GREEDY, assert_idle, engine_of, open_llm, run, tokens

from llm import LLM, GenerationInterrupted, RequestOutput, SamplingParams, ValidationError
from llm.engine.step import RunnerOutput

PROMPTS = [f"In the year {index}" for index in range(30)]
PARAMS = [SamplingParams(temperature=0.7, max_tokens=1 + index * 7 % 11) for index in range(30)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


def restart(llm: LLM) -> None:
    """The next call derives its seeds as the first one."""
    llm._preprocessor._call_numbers = itertools.count()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    restart(llm)
    return tokens(run(llm, PROMPTS, PARAMS))


def in_order(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return sorted(outputs, key=lambda output: output.index)


def test_the_outputs_of_an_iterator_are_those_of_generate(llm: LLM, expected: list[list[int]]) -> None:
    restart(llm)
    outputs = list(llm.generate_iter(iter(PROMPTS), (params for params in PARAMS)))
    assert [output.index for output in outputs] != list(range(30))  # as they end
    assert tokens(in_order(outputs)) == expected
    restart(llm)
    ordered = list(llm.generate_iter(PROMPTS, PARAMS, ordered=True))
    assert [output.index for output in ordered] == list(range(30))
    assert tokens(ordered) == expected


def test_lines_of_a_file_are_prompts(llm: LLM, tmp_path: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("In the beginning\nAnd Moses")
    with path.open() as file:
        outputs = list(llm.generate_iter(file, GREEDY, ordered=True))
    assert [output.prompt for output in outputs] == ["In the beginning", "And Moses"]
    assert tokens(outputs) == tokens(run(llm, ["In the beginning", "And Moses"]))
    assert [output.prompt for output in llm.generate_iter("And Moses", GREEDY)] == ["And Moses"]
    assert list(llm.generate_iter(iter([]))) == []


def test_prompts_are_read_as_they_are_needed(llm: LLM) -> None:
    read = []

    def endless() -> Iterator[str]:
        while len(read) < 3000:
            read.append(len(read))
            yield "And"

    stream = llm.generate_iter(endless(), GREEDY)
    assert [next(stream).prompt for _ in range(3)] == ["And"] * 3
    assert len(read) <= 512
    assert engine_of(llm).scheduler.requests
    stream.close()
    assert_idle(llm)


def test_other_calls_run_between_two_outputs(llm: LLM, expected: list[list[int]]) -> None:
    """One of them fails, which drops all requests of the engine: the rows in flight start again."""
    alone = tokens(run(llm, ["The king"]))
    restart(llm)
    stream = llm.generate_iter(PROMPTS, PARAMS)
    outputs = [next(stream) for _ in range(3)]
    assert tokens(run(llm, ["The king"])) == alone
    outputs += [next(stream) for _ in range(3)]
    runner = engine_of(llm).runner
    runner.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        run(llm, ["The king"])
    del runner.execute
    outputs += stream
    assert tokens(in_order(outputs)) == expected


def test_what_happens_between_two_outputs_loses_no_row_and_leaving_leaves_none(
    llm: LLM, expected: list[list[int]]
) -> None:
    restart(llm)
    engine = engine_of(llm)
    stream = llm.generate_iter(PROMPTS, PARAMS)
    outputs = [next(stream)]
    assert engine.scheduler.has_unfinished()  # rows that the failure drops
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        run(llm, ["The king"])
    engine.runner.execute = execute
    outputs += stream
    assert tokens(in_order(outputs)) == expected
    stream = llm.generate_iter(PROMPTS, PARAMS)
    next(stream)
    assert engine.scheduler.has_unfinished()
    stream.close()
    assert_idle(llm)


def test_an_error_waits_for_the_rows_before_it(llm: LLM) -> None:
    def broken() -> Iterator[str]:
        yield from PROMPTS[:3]
        raise LookupError("of the iterable")

    for prompts, error in ((broken(), LookupError), ([*PROMPTS[:3], [], "And"], ValidationError)):
        stream = llm.generate_iter(prompts, GREEDY, ordered=True)
        found = []
        with pytest.raises(error, match=r"of the iterable|^prompt 3: the prompt is empty"):
            for output in stream:
                found.append(output.index)
        assert found == [0, 1, 2]
    outputs = list(llm.generate_iter([*PROMPTS[:3], [], "And"], GREEDY, on_error="return", ordered=True))
    assert [output.error is not None for output in outputs] == [False, False, False, True, False]
    with pytest.raises(ValidationError, match="there are 2 sampling_params and more prompts"):
        list(llm.generate_iter(PROMPTS, PARAMS[:2]))
    with pytest.raises(ValidationError, match="ordered must be"):
        llm.generate_iter(PROMPTS, ordered=1)


def test_ctrl_c_hands_over_what_is_in_flight(llm: LLM, ctrl_c: None) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    runner = engine_of(llm).runner
    execute, steps = runner.execute, []

    def hooked(plan: Any) -> RunnerOutput:
        steps.append(plan)
        if len(steps) == 12:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    runner.execute = hooked
    try:
        stream = llm.generate_iter(PROMPTS, params)
        given = []
        with pytest.raises(GenerationInterrupted) as caught:
            for output in stream:
                given.append(output)
    finally:
        del runner.execute
    left = caught.value.outputs
    assert sorted(output.index for output in (*given, *left)) == list(range(30)) and len(given) == 4
    assert {output.outputs[0].finish_reason for output in left} == {"interrupted"}
    assert any(output.outputs[0].token_ids for output in left)
    assert llm.last_outputs == left
    whole = tokens(run(llm, PROMPTS, params))
    assert all(whole[output.index][: len(own)] == own for output in left for own in tokens([output]))


class StubRunner:
    """Every row ends with its first token; nothing is computed."""

    def execute(self, plan: Any) -> RunnerOutput:
        return RunnerOutput({request_id: [5] for request_id in plan.num_scheduled_tokens})

    def end_call(self) -> None: ...
    def close(self) -> None: ...


def growth(llm: LLM, kept: list[RequestOutput] | None = None) -> int:
    """How many more blocks of memory Python holds while the last rows go through than while the first do."""
    params = SamplingParams(max_tokens=1, seed=1, temperature=0)
    count = 1800
    most = [0, 0, 0]
    for done, output in enumerate(llm.generate_iter(([1, index % 2000] for index in range(count)), params)):
        most[3 * done // count] = max(most[3 * done // count], sys.getallocatedblocks())
        if kept is not None:
            kept.append(output)
    return most[2] - most[0]


def test_memory_does_not_grow_with_the_number_of_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llm)
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "runner", StubRunner())
        assert growth(llm) < 5000
        assert growth(llm, kept=[]) > 12000
    engine.reset()
