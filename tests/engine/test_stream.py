"""`LLM.stream`: text as it comes, rows that end when the loop does, and other calls in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from embedded import GREEDY, PROMPTS, assert_idle, engine_of, free_blocks, open_llm, run, tokens

from llm import LLM, EngineClosedError, LLMError, SamplingParams, ValidationError

LONGER = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


def text_of(llm: LLM, prompt: str, params: SamplingParams = LONGER) -> str:
    return run(llm, prompt, params)[0].outputs[0].text


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_pieces_are_the_text(llm: LLM, prompt: str) -> None:
    pieces = list(llm.stream(prompt, LONGER))
    assert "".join(pieces) == text_of(llm, prompt)
    assert len(pieces) > 5
    assert all(pieces)


def test_sampled_with_a_seed(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=20)
    assert "".join(llm.stream(PROMPTS[0], params)) == text_of(llm, PROMPTS[0], params)


def test_characters_of_several_tokens_come_whole(llm: LLM) -> None:
    ids = engine_of(llm).tokenizer.encode(["Ωé😀"])[0]
    assert len(ids) > 4  # byte tokens: a piece must not hold half a character
    stream = llm.stream("Ωé😀 and", SamplingParams(seed=1, temperature=2.0, max_tokens=60, ignore_eos=True))
    pieces = list(stream)
    params = SamplingParams(seed=1, temperature=2.0, max_tokens=60, ignore_eos=True)
    assert "".join(pieces) == text_of(llm, "Ωé😀 and", params)


@pytest.mark.parametrize("start", [1, 7, 15])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_no_part_of_a_stop_string_leaks(llm: LLM, start: int, length: int) -> None:
    whole = text_of(llm, PROMPTS[0])
    stop = whole[start : start + length]
    params = SamplingParams(temperature=0, max_tokens=20, stop=stop, ignore_eos=True)
    seen = ""
    for piece in llm.stream(PROMPTS[0], params):
        seen += piece
        assert whole[: whole.index(stop)].startswith(seen)
    assert seen == whole[: whole.index(stop)]
    kept = SamplingParams(temperature=0, max_tokens=20, stop=stop, ignore_eos=True, include_stop_str_in_output=True)
    assert "".join(llm.stream(PROMPTS[0], kept)) == whole[: whole.index(stop) + length]


def test_the_token_that_ends_an_answer_is_in_no_text_unless_asked_for(llm: LLM) -> None:
    engine = engine_of(llm)
    (eos, *_) = engine.eos_token_ids
    ended = SamplingParams(temperature=0, max_tokens=9, logit_bias={eos: 100.0}, skip_special_tokens=False)
    written = engine.tokenizer.decode([eos], skip_special_tokens=False)
    for kept in (False, True):
        ended.include_stop_str_in_output = kept
        (output,) = llm.generate(PROMPTS[0], ended, use_tqdm=False)
        assert output.outputs[0].token_ids == [eos] and output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].text == "".join(llm.stream(PROMPTS[0], ended)) == (written if kept else "")


@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_stop_string_that_ends_just_past_a_piece_does_not_leak(llm: LLM, length: int) -> None:
    """All but its last character has come by then. A shorter stop string does not shorten what is held back."""
    pieces = list(llm.stream(PROMPTS[0], LONGER))
    whole = "".join(pieces)
    ends = [len("".join(pieces[: count + 1])) + 1 for count in range(len(pieces) - 1)]
    for stop in {whole[end - length : end] for end in ends if end >= length}:
        params = SamplingParams(temperature=0, max_tokens=20, stop=[stop, "#"], ignore_eos=True)
        assert "".join(llm.stream(PROMPTS[0], params)) == whole[: whole.index(stop)]


def test_of_stop_strings_that_one_piece_completes_the_first_to_end_counts(llm: LLM) -> None:
    whole, seen, checked = text_of(llm, PROMPTS[0]), 0, 0
    for piece in llm.stream(PROMPTS[0], LONGER):
        start, seen = seen, seen + len(piece)
        early, late = whole[max(0, start - 4) : start + 1], whole[max(0, start - 4) : seen]
        if len(piece) < 2 or whole.index(early) != max(0, start - 4):
            continue
        params = SamplingParams(temperature=0, max_tokens=20, stop=[late, early], ignore_eos=True)
        completion = run(llm, PROMPTS[0], params)[0].outputs[0]
        assert (completion.stop_reason, completion.text) == (early, whole[: max(0, start - 4)])
        checked += 1
    assert checked > 2


def test_a_stop_string_counts_from_the_token_after_min_tokens_on(llm: LLM) -> None:
    ids = run(llm, PROMPTS[0], LONGER)[0].outputs[0].token_ids
    texts = [
        run(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))[0].outputs[0].text
        for count in range(1, len(ids) + 1)
    ]
    whole, checked = texts[-1], 0
    for count in range(2, len(ids)):  # the `count`-th token completes it
        stop = texts[count - 1][-3:]
        if whole.count(stop) != 1 or len(texts[count - 1]) == len(texts[count - 2]):
            continue
        checked += 1
        for min_tokens, reason in ((0, "stop"), (count - 1, "stop"), (count, "length"), (count + 1, "length")):
            params = SamplingParams(temperature=0, max_tokens=20, stop=stop, min_tokens=min_tokens, ignore_eos=True)
            completion = run(llm, PROMPTS[0], params)[0].outputs[0]
            assert (completion.finish_reason, len(completion.token_ids)) == (reason, count if reason == "stop" else 20)
    assert checked > 5


def test_what_only_looks_like_a_stop_string_is_not_lost(llm: LLM) -> None:
    whole = text_of(llm, PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=whole[-3:] + "#", logprobs=0)
    assert "".join(llm.stream(PROMPTS[0], params)) == whole


def test_nothing_starts_before_the_first_piece_is_asked_for(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert_idle(llm)
    del stream


def test_leaving_the_loop_frees_the_blocks_at_once(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], LONGER)
    next(stream)
    assert free_blocks(llm) < [llm.config.cache_config.num_blocks]  # the row holds some
    stream.close()  # what `break` in a loop over a temporary does
    assert_idle(llm)


def test_a_collected_generator_frees_its_row(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS[0], LONGER):
        break
    assert_idle(llm)
    cycle: list[object] = [llm.stream(PROMPTS[1], LONGER)]
    cycle.append(cycle)
    next(cycle[0])  # type: ignore[call-overload]
    del cycle
    assert engine_of(llm).scheduler.requests
    gc.collect()
    assert_idle(llm)


def test_a_generator_collected_in_the_middle_of_a_call_frees_its_row(llm: LLM) -> None:
    streams = [llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))]
    next(streams[0])
    expected = tokens(run(llm, PROMPTS, LONGER))
    rows_left = []

    class Bar:
        """A progress bar is the one place where the user's code runs inside a call."""

        def __init__(self, **_: object) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def close(self) -> None:
            rows_left.append(len(engine_of(llm).scheduler.requests))

        def update(self, count: int) -> None:
            streams.clear()

    outputs = llm.generate(PROMPTS, LONGER, use_tqdm=Bar)
    assert tokens(outputs) == expected
    assert rows_left == [0]  # it did not run on until the call was over


def test_generate_while_a_stream_is_suspended(llm: LLM) -> None:
    expected = text_of(llm, PROMPTS[0])
    alone = tokens(run(llm, PROMPTS[1:], GREEDY))
    stream = llm.stream(PROMPTS[0], LONGER)
    pieces = [next(stream), next(stream)]
    outputs = run(llm, PROMPTS[1:], GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS[1:]
    assert tokens(outputs) == alone
    assert run(llm, []) == []
    assert not llm.reset_prefix_cache()  # its blocks are in use
    assert llm.chat([{"role": "user", "content": "Who?"}], GREEDY, use_tqdm=False)[0].finished
    assert "".join(pieces) + "".join(stream) == expected


def test_a_stream_that_ends_during_another_call_still_gives_all_its_text(llm: LLM) -> None:
    expected = text_of(llm, PROMPTS[0])
    stream = llm.stream(PROMPTS[0], LONGER)
    first = next(stream)
    run(llm, PROMPTS[1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert first + "".join(stream) == expected


def test_two_streams_interleaved(llm: LLM) -> None:
    expected = [text_of(llm, prompt) for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, LONGER) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    open_streams = [0, 1]
    while open_streams:
        for index in list(open_streams):
            piece = next(streams[index], None)
            if piece is None:
                open_streams.remove(index)
            else:
                texts[index] += piece
    assert texts == expected


def test_a_stream_that_outlives_its_engine_says_so() -> None:
    with open_llm() as llm:
        stream = llm.stream(PROMPTS[0], LONGER)
        next(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        list(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        next(llm.stream(PROMPTS[0]))


def test_a_stream_dropped_by_an_error_of_another_call_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(PROMPTS[0], LONGER)
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine_of(llm).runner, "execute", lambda plan: 1 / 0)
        run(llm, PROMPTS)
    with pytest.raises(LLMError, match="start it again"):
        list(stream)
    assert "".join(llm.stream(PROMPTS[0], LONGER)) == text_of(llm, PROMPTS[0])


@pytest.mark.parametrize("prompt, params", [(PROMPTS, GREEDY), (PROMPTS[0], SamplingParams(n=2)), ([], GREEDY)])
def test_one_prompt_and_one_completion(llm: LLM, prompt: object, params: SamplingParams) -> None:
    with pytest.raises(ValidationError, match=r"stream takes .*use generate\(\)"):
        next(llm.stream(prompt, params))


def test_a_stream_without_text_is_refused(llm: LLM) -> None:
    """It ended after all tokens, without a piece."""
    with pytest.raises(ValidationError, match=r"there is none with detokenize=False; use generate\(\)"):
        next(llm.stream(PROMPTS[0], SamplingParams(max_tokens=2, detokenize=False)))
    with open_llm(skip_tokenizer_init=True) as untold, pytest.raises(ValidationError, match="none without a tokenizer"):
        next(untold.stream({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2)))
