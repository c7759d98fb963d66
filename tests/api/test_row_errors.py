"""Prompts that cannot be run, or are too long: what becomes of them, and that the others do not notice."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from embedded import GREEDY, assert_idle, open_llm, run, tokens

from llm import LLM, RequestOutput, SamplingParams, ValidationError
from llm.engine.preprocess import RowNumbers
from llm.errors import EmptyPromptError, PromptTooLongError, TokenOutOfRangeError

LONG = "the king " * 100
PROMPTS = ["In the beginning", [], LONG, [1, 10**6], "And Moses", {"prompt": 3}, "The king"]
BAD = {1: EmptyPromptError, 2: PromptTooLongError, 3: TokenOutOfRangeError, 5: ValidationError}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=48) as llm:
        yield llm


def returned(llm: LLM, prompts: object, params: object = GREEDY, **options: object) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert_idle(llm)
    return outputs


def test_bad_rows_are_answered_in_their_places(llm: LLM) -> None:
    outputs = returned(llm, PROMPTS, on_error="return")
    assert [output.index for output in outputs] == list(range(len(PROMPTS)))
    assert {output.index: type(output.error) for output in outputs if output.error} == BAD
    good = [index for index in range(len(PROMPTS)) if index not in BAD]
    assert tokens([outputs[index] for index in good]) == tokens(run(llm, [PROMPTS[index] for index in good]))
    for index in BAD:
        [own] = outputs[index].outputs
        assert (own.finish_reason, own.text, own.token_ids) == ("error", "", [])
        assert outputs[index].finished and own.error is outputs[index].error
    long = outputs[2].error
    assert isinstance(long, PromptTooLongError) and (long.num_tokens, long.limit) == (len(ids_of(llm, LONG)), 48)


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm._preprocessor.tokenizer.encode([text])[0]


def test_by_default_every_bad_row_is_named(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"^prompt 1: .* \(also bad: 2, 3, 5\)"):
        run(llm, PROMPTS)
    with pytest.raises(ValidationError, match="on_error must be 'raise' or 'return', got 'ignore'"):
        returned(llm, PROMPTS, on_error="ignore")
    with pytest.raises(ValidationError, match="on_too_long must be"):
        returned(llm, PROMPTS, on_too_long="cut")


def test_params_of_one_row_are_an_error_of_that_row(llm: LLM) -> None:
    wrong = SamplingParams(max_tokens=4, stop_token_ids=[10**6])
    outputs = returned(llm, ["a", "b", "c"], [GREEDY, wrong, GREEDY], on_error="return")
    assert [output.error is not None for output in outputs] == [False, True, False]
    assert outputs[1].error.parameter == "stop_token_ids"
    with pytest.raises(ValidationError, match="2 sampling_params for 3"):  # of the call, not of a row
        returned(llm, ["a", "b", "c"], [GREEDY, GREEDY], on_error="return")


def test_derived_seeds_do_not_depend_on_bad_rows(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    [_, one], [_, other] = (
        llm._preprocessor.checked_rows([first, "b"], params, SamplingParams, numbers=RowNumbers(7, 0))
        for first in ("a", [])
    )
    assert one.seed == other.seed


@pytest.mark.parametrize(("how", "head"), [("truncate_left", 0), ("truncate_middle", 18)])
def test_a_long_prompt_is_cut_to_leave_room(llm: LLM, how: str, head: int) -> None:
    whole = ids_of(llm, LONG)
    [output, short] = returned(llm, [LONG, "And"], on_too_long=how)
    room = 48 - GREEDY.max_tokens
    assert output.prompt_token_ids == whole[:head] + whole[len(whole) - room + head :]
    assert (output.num_dropped_tokens, short.num_dropped_tokens) == (len(whole) - room, 0)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    assert tokens([output]) == tokens(run(llm, [output.prompt_token_ids]))
    [free] = returned(llm, [LONG], SamplingParams(temperature=0, ignore_eos=True), on_too_long=how)
    assert len(free.prompt_token_ids) == 36 and len(free.outputs[0].token_ids) == 12


def test_only_too_long_prompts_are_skipped(llm: LLM) -> None:
    outputs = returned(llm, ["And", LONG], on_too_long="skip")
    assert outputs[1].outputs[0].finish_reason == "skipped" and isinstance(outputs[1].error, PromptTooLongError)
    with pytest.raises(ValidationError, match=r"^prompt 2: the prompt is empty"):
        returned(llm, ["And", LONG, []], on_too_long="skip")


def test_outputs_are_told_as_they_end(llm: LLM) -> None:
    told: list[RequestOutput] = []
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=2) for count in (5, 9, 2)]
    outputs = returned(llm, ["a", [], "b"], params, on_error="return", on_output=told.append)
    assert [output.index for output in told] == [1, 2, 0]
    assert sorted(told, key=lambda output: output.index) == outputs

    def stop(output: RequestOutput) -> None:
        raise LookupError("of the callback")

    with pytest.raises(LookupError):
        returned(llm, ["a", "b", "c"], params, on_output=stop)
    assert_idle(llm)
    assert [output.finished for output in llm.last_outputs] == [False, False, True]


def test_errors_can_be_pickled(llm: LLM) -> None:
    for output in returned(llm, PROMPTS, on_error="return"):
        again = pickle.loads(pickle.dumps(output))
        assert (type(again.error), str(again.error)) == (type(output.error), str(output.error))
        assert getattr(again.error, "__dict__", None) == getattr(output.error, "__dict__", None)
