"""Drafts change no answer: whatever is drafted, tokens, texts, logprobs and how a request ends are as without.

One workload of every feature that has a say in what is sampled, answered without drafts and then with proposers that
look the answer up and draft it rightly, wrongly, in part or at random. `assert_same` is the comparison of this file.
`test_drafts_defects.py` holds the negative controls.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from documented_processors import DummyLogitsProcessor
from drafts import KINDS, Answers, FakeProposer, Recorder, drafting, fake
from embedded import PROMPTS, assert_idle, engine_of, open_llm, run
from same_answers import CACHE, Answer, same

from llm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from llm.errors import LogitsProcessorError
from llm.runner.speculation.proposer import ComputedStep, Proposer
from llm.sampling.logits_processors import NoRepeatNGramLogitsProcessor
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling_params import RepetitionDetectionParams

SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks and few rows": {"max_num_batched_tokens": 9, "max_num_seqs": 5, "block_size": 4},
    "processed logprobs": {"logprobs_mode": "processed_logprobs", "enable_prefix_caching": False},
    "custom processors": {"logits_processors": [DummyLogitsProcessor, NoRepeatNGramLogitsProcessor], "block_size": 1},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
Workload = tuple[list[str], list[SamplingParams]]


def prefer_long_outputs(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A callable of a request, whose change depends on every token before."""
    logits[(sum(output_ids) * 31 + len(output_ids)) % len(logits)] += 6.0
    return logits


def with_the_prompt(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(len(prompt_ids) + len(output_ids))


# Each is sampled with a seed, and greedily.
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cuts": {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "bias": {"logit_bias": {300: 3.0, 17: -4.0}},
    "allowed tokens": {"allowed_token_ids": list(range(300, 340))},
    "bad words": {"bad_words": ["the", "And the", " of"]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(300, 700))},
    "stop tokens": {"stop_token_ids": list(range(300, 330))},
    "stop string": {"stop": ["e", "ab"], "min_tokens": 4},
    "stop string in the text": {"stop": " the", "include_stop_str_in_output": True, "ignore_eos": True},
    "repetition": {"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=2)},
    "prompt logprobs": {"prompt_logprobs": 2},
    "chosen logprobs": {"logprobs": None, "logprob_token_ids": [5, 300, 17]},
    "flat logprobs": {"flat_logprobs": True},
    "several": {"n": 3, "presence_penalty": 1.0},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 40},
    "regex": {
        "structured_outputs": StructuredOutputsParams(regex="(ab|c){2,5}d"),
        "max_tokens": 20,
        "frequency_penalty": 1.0,
    },
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["In the beginning", "In the end", "And"])},
    "callables": {"logits_processors": [prefer_long_outputs, with_the_prompt]},
    "custom": {"extra_args": {"target_token": 67}, "max_tokens": 7},
    "no repeats": {"extra_args": {"no_repeat_ngram_size": 2}},
}


def workload() -> Workload:
    prompts, params = [], []
    for index, own in enumerate(FEATURES.values()):
        for temperature in (0.0, 1.0):
            length = {"max_tokens": 12 + index % 5, "logprobs": 3, "seed": index, "temperature": temperature}
            prompts.append(PROMPTS[index % len(PROMPTS)])
            params.append(SamplingParams(**{**length, **own}))
    # Lengths around the number of drafts.
    for count in range(1, 9):
        prompts.append(PROMPTS[0])
        params.append(SamplingParams(temperature=0, max_tokens=count, logprobs=0, ignore_eos=True))
    return prompts, params


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Everything that answers say but for logprobs."""
    return [
        (
            output.prompt_token_ids,
            [
                (item.token_ids, item.text, item.finish_reason, item.stop_reason, item.structured, str(item.error))
                for item in output.outputs
            ],
        )
        for output in outputs
    ]


def scored(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """Their logprobs, those of prompts too, which begin with None."""
    prompts = [([], output.prompt_logprobs[1:] if output.prompt_logprobs else None) for output in outputs]
    return [*prompts, *((item.token_ids, item.logprobs) for output in outputs for item in output.outputs)]


def assert_same(expected: Sequence[RequestOutput], actual: Sequence[RequestOutput]) -> None:
    assert told(expected) == told(actual)
    assert same(scored(actual), scored(expected))


class Opened:
    """An engine, what it answers without drafts, and what its rows then sampled."""

    def __init__(self, llm: LLM, work: Workload) -> None:
        self.llm, self.work = llm, work
        recorder = Recorder()
        with drafting(llm, recorder):
            self.plain = run(llm, *work)
        self.answers: Answers = recorder.answers
        self.steps = llm.stats().steps

    def drafted(self, kind: str) -> tuple[list[RequestOutput], FakeProposer]:
        with drafting(self.llm, fake(self.llm, kind, self.answers)) as proposer:
            outputs = run(self.llm, *self.work)
        assert_idle(self.llm)
        return outputs, proposer


@pytest.fixture(scope="module", params=SETTINGS)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    with open_llm(**CACHE, **SETTINGS[request.param]) as llm:
        yield Opened(llm, workload())


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_what_is_drafted(opened: Opened, kind: str) -> None:
    before = opened.llm.stats().steps
    outputs, proposer = opened.drafted(kind)
    assert_same(opened.plain, outputs)
    assert proposer.drafted > 50
    if kind == "right":
        assert proposer.accepted == proposer.drafted
        assert opened.llm.stats().steps - before < 0.8 * opened.steps
    if kind == "wrong":
        assert proposer.accepted == 0
    if kind == "partly":
        assert 0 < proposer.accepted < proposer.drafted


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(**CACHE, block_size=4) as opened:
        yield opened


def answers_of(llm: LLM, prompts: Any, params: Any) -> tuple[list[RequestOutput], Answers]:
    with drafting(llm, recorder := Recorder()):
        return run(llm, prompts, params), recorder.answers


def second_turns(kind: str | None, prefix_caching: bool = True) -> list[RequestOutput]:
    """Of prompts that go on with an answer, and with what had been drafted wrongly."""
    first = SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
    second = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    with open_llm(**CACHE, block_size=4, enable_prefix_caching=prefix_caching) as llm:
        _, answers = answers_of(llm, PROMPTS, first)
        engine_of(llm).scheduler.blocks.reset_prefix_cache()
        with drafting(llm, fake(llm, kind, answers) if kind else None):
            outputs = run(llm, PROMPTS, first)
            turns = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
            vocab = llm.config.model_config.vocab_size
            # As `FakeProposer` drafts wrongly, for the second token and for a later one.
            wrong = [[*turn[:-k], *((token + 1) % vocab for token in turn[-k:])] for turn in turns for k in (22, 12)]
            again = run(llm, [*turns, *wrong], second)
        assert_idle(llm)
        return again


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_prefix_cache_knows_what_was_accepted_and_nothing_else(prefix_caching: bool) -> None:
    plain = second_turns(None, prefix_caching)
    cached = [output.num_cached_tokens for output in plain]
    assert any(cached) == prefix_caching
    for kind in KINDS:
        again = second_turns(kind, prefix_caching)
        assert_same(plain, again)
        assert [output.num_cached_tokens for output in again] == cached


@pytest.mark.parametrize("kind", KINDS)
def test_a_callable_that_raises_ends_its_row_where_it_would_have(llm: LLM, kind: str) -> None:
    def third_token(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 3:
            raise ValueError("no third token")
        return logits

    params = [
        SamplingParams(temperature=0, max_tokens=9, logits_processors=[third_token], logprobs=1),
        SamplingParams(temperature=0, max_tokens=9, logprobs=1),
        # These have ended by then.
        SamplingParams(temperature=0, max_tokens=3, logits_processors=[third_token], logprobs=1),
    ]
    plain, answers = answers_of(llm, PROMPTS, params)
    # ... or their text has.
    text = plain[2].outputs[0].text
    params.append(SamplingParams(temperature=0, max_tokens=9, stop=text[-2:], logits_processors=[third_token]))
    prompts = [*PROMPTS, PROMPTS[2]]
    plain, more = answers_of(llm, prompts, params)
    assert [output.outputs[0].finish_reason for output in plain] == ["error", "length", "length", "stop"]
    answers |= more
    for key, own in answers.items():
        answers[key] = [*own, 5, 6, 7, 8]  # go on behind the end, too
    with drafting(llm, fake(llm, kind, answers)) as proposer:
        assert_same(plain, run(llm, prompts, params))
    assert proposer.drafted
    assert_idle(llm)


class AtLength(LogitsProcessor):
    """Raises, or fails the whole call, where the first row has four tokens."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        for row, _, _, output in batch_update.added if batch_update else ():
            self.outputs[row] = output

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self.outputs[0]) == 4:
            raise RuntimeError("four tokens")
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_that_raises_fails_the_call_if_it_would_have(kind: str) -> None:
    with open_llm(**CACHE, block_size=4) as plain:
        params = SamplingParams(seed=1, max_tokens=9)
        whole, answers = answers_of(plain, PROMPTS[0], params)
        third = SamplingParams(seed=1, max_tokens=9, stop_token_ids=[whole[0].outputs[0].token_ids[3]])
        expected, more = answers_of(plain, PROMPTS[0], third)
        assert expected[0].outputs[0].finish_reason == "stop" and len(expected[0].outputs[0].token_ids) == 4
    answers |= {key: [*own, 5, 6, 7] for key, own in more.items()}
    with open_llm(**CACHE, block_size=4, logits_processors=[AtLength]) as llm:
        with drafting(llm, fake(llm, kind, answers)):
            with pytest.raises(LogitsProcessorError, match="four tokens"):
                run(llm, PROMPTS[0], params)
            # It has ended before anybody sees its fifth line.
            assert_same(expected, run(llm, PROMPTS[0], third))
        assert_idle(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_those_that_are_left(llm: LLM, kind: str) -> None:
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, stop="zzzz", presence_penalty=1.0)
    plain, answers = answers_of(llm, PROMPTS, params)
    with drafting(llm, fake(llm, kind, answers)) as proposer:
        streams = [llm.stream(prompt, params) for prompt in PROMPTS]
        begun = [next(stream) + next(stream) for stream in streams]
        del streams[2]  # in the middle, with drafts that nobody verifies
        assert_same(plain[2:], run(llm, PROMPTS[2], params))
        for text, stream, output in zip(begun, streams, plain, strict=False):
            assert text + "".join(stream) == output.outputs[0].text
        assert_idle(llm)
        run(llm, PROMPTS[0], SamplingParams(max_tokens=1))
        assert len(proposer.alive) == 1
    assert proposer.drafted > 20


class Mistaken(Proposer):
    def __init__(self, drafts: dict[str, list[int]]) -> None:
        self.drafts = drafts

    def propose(self, step: ComputedStep) -> dict[str, list[int]]:
        return self.drafts or {step.batch.request_ids[0]: [5, 10**6]}


@pytest.mark.parametrize(("drafts", "message"), [({"x": [1]}, "no request of the batch"), ({}, "token ids are below")])
def test_drafts_that_cannot_be_are_refused(llm: LLM, drafts: dict[str, list[int]], message: str) -> None:
    with drafting(llm, Mistaken(drafts)), pytest.raises(ValueError, match=message):
        run(llm, PROMPTS, SamplingParams(max_tokens=4))
    assert_idle(llm)
    run(llm, PROMPTS, SamplingParams(max_tokens=4))


def test_all_lines_share_a_pass_over_the_lm_head_where_they_fit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where they do not, a step computes no more logits at once than it may; the answer is the same."""
    params = [
        SamplingParams(temperature=0, max_tokens=15, logprobs=2, presence_penalty=0.1 * index) for index in range(3)
    ]
    runner = engine_of(llm).runner
    compute, sizes = runner.model.compute_logits, []

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    plain, answers = answers_of(llm, PROMPTS, params)
    monkeypatch.setattr(runner.model, "compute_logits", watched)
    with drafting(llm, fake(llm, "right", answers)):
        assert_same(plain, run(llm, PROMPTS, params))
        assert sizes == [3, 21, 21]
        sizes.clear()
        monkeypatch.setattr(runner, "_logit_rows_at_once", 4)
        assert_same(plain, run(llm, PROMPTS, params))
        assert sizes == [3] * 15
        sizes.clear()
        greedy = SamplingParams(temperature=0, max_tokens=15, logprobs=2)
        assert_same(run(llm, PROMPTS[0], greedy), plain[:1])
        assert max(sizes) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_plan_and_answer_are_plain_data(llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a pipe lay between engine and runner."""
    params = [SamplingParams(seed=1, max_tokens=14, logprobs=2, presence_penalty=0.5 * index) for index in range(3)]
    plain, answers = answers_of(llm, PROMPTS, params)
    runner = engine_of(llm).runner
    execute = runner.execute
    copy = copy_by_pickle
    monkeypatch.setattr(runner, "execute", lambda plan: copy(execute(copy(plan))))
    with drafting(llm, fake(llm, kind, answers)) as proposer:
        assert_same(plain, run(llm, PROMPTS, params))
    assert proposer.drafted


def copy_by_pickle(item: Any) -> Any:
    return pickle.loads(pickle.dumps(item))
