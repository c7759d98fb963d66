"""Replicas: the bits of one process, whoever computes and whoever dies; all calls; nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented_processors import DummyLogitsProcessor
from embedded import engine_of, open_llm
from kernel_sets import needs_kernels
from replicas.raising import Raises
from workers.echo_role import SCHEMA

from llm import LLM, AsyncLLM, GenerationInterrupted, SamplingParams, ValidationError, WorkerDiedError
from llm.config.engine import LLMArgs
from llm.errors import LogitsProcessorError
from llm.replicas.placement import Placement
from llm.replicas.processes import Replicas, _Seat
from llm.replicas.schema import ReplicaArgs
from llm.sampling_params import StructuredOutputsParams
from llm.workers.messages import Message
from llm.workers.process import WorkerProcess

pytestmark = needs_kernels
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "logits_processors": [DummyLogitsProcessor, Raises],
    "speculative_config": "auto",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
# Of every kind, and of different lengths; some without a seed.
PARAMS = [
    SamplingParams(temperature=0.9, max_tokens=20, logprobs=2, prompt_logprobs=1, seed=7),
    SamplingParams(temperature=0.8, max_tokens=9, n=3),
    SamplingParams(max_tokens=24, stop=["the", "and"], include_stop_str_in_output=True),
    SamplingParams(temperature=0, max_tokens=5, extra_args={"target_token": 67}),
    SamplingParams(max_tokens=12, presence_penalty=1.0, repetition_penalty=1.2, logit_bias={9: 2.0}, min_tokens=3),
    SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")),
    SamplingParams(max_tokens=8, top_k=5, top_p=0.9, bad_words=["the"], logprob_token_ids=[1, 2]),
    SamplingParams(max_tokens=4, detokenize=False),
]
TEXTS = ["In the beginning", "And the LORD said unto Moses", "The king", "Blessed are the"]
PROMPTS = [f"{TEXTS[index % 4]} {index // 8}" for index in range(24)]
ALL = [PARAMS[index % len(PARAMS)] for index in range(24)]


def plain(outputs: Any) -> list[Any]:
    """What must be the same, to the bit."""
    return [
        (
            output.index,
            output.seed,
            output.prompt,
            output.prompt_logprobs,
            [
                (item.token_ids, item.text, item.logprobs, item.finish_reason, item.stop_reason, item.structured)
                for item in output.outputs
            ],
        )
        for output in outputs
    ]


def run(llm: LLM) -> list[Any]:
    return plain(llm.generate(PROMPTS, ALL, use_tqdm=False))


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with open_llm(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(one: LLM) -> list[Any]:
    """Of the first call of an `LLM`."""
    return run(one)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with open_llm(**OPTIONS, data_parallel_size=2) as llm:
        pids = pids_of(llm)
        yield llm
    assert_gone(pids)


def pids_of(llm: LLM) -> list[int]:
    return [worker.pid for worker in engine_of(llm)._replicas.alive.values()]


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def assert_idle(llm: LLM) -> None:
    engine = engine_of(llm)
    engine.scheduler.check_integrity()
    assert not engine.scheduler.requests and not engine._completions


def test_answers_are_those_of_one_process(two: LLM, expected: list[Any]) -> None:
    found = run(two)
    assert found == expected
    assert len({str(item) for item in found}) == len(found)  # a constant would agree as well
    stats = two.stats()
    assert stats.ended and stats.generated_tokens > 100 and stats.running == stats.waiting == 0
    assert_idle(two)
    metrics = {metric.name for metric in two.get_metrics()}
    assert "vllm:kv_cache_usage_perc" in metrics


def test_every_replica_has_computed_some(two: LLM) -> None:
    assert sorted(engine_of(two)._used) == [0, 1]
    assert two.config.replicas == 2 and "of each of 2 replicas" in str(two.config)


def test_weights_are_in_memory_once(one: LLM, two: LLM) -> None:
    shared, alone = engine_of(two)._replicas.shared_bytes, one.stats().weight_bytes
    assert shared > 0.95 * alone and two.stats().weight_bytes == 2 * alone - shared
    assert f"{shared:,} bytes of weights are in memory once" in two.config.reasons["replicas"]


def test_other_calls_are_those_of_one_process(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=8, seed=5)
    conversation = [{"role": "user", "content": "Who are you?"}]
    for call in (
        lambda llm: plain(llm.chat([conversation, conversation], params, use_tqdm=False)),
        lambda llm: list(llm.stream(TEXTS[0], params)),
        lambda llm: plain(llm.generate_iter(iter(PROMPTS), params, ordered=True)),
        lambda llm: llm.loglikelihood(TEXTS[:2], [" God", " speak"]),
        lambda llm: [item.sequences[0].tokens for item in llm.beam_search(TEXTS[:2], beam_params())],
        lambda llm: llm.perplexity(TEXTS),
    ):
        assert call(one) == call(two)
    assert_idle(two)
    parts = [[part for part in llm.explain().parts if part.kind != "platform"] for llm in (one, two)]
    assert parts[0] == parts[1]  # the platform was asked for, in a replica


def beam_params() -> Any:
    from llm.sampling_params import BeamSearchParams

    return BeamSearchParams(beam_width=2, max_tokens=4)


def test_a_job_writes_the_same_file(one: LLM, two: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": index, "prompt": text}) + "\n" for index, text in enumerate(PROMPTS)))
    params = SamplingParams(temperature=0.8, max_tokens=6)
    written = []
    for llm, name in ((one, "one"), (two, "two")):
        llm.run(source, tmp_path / f"{name}.jsonl", sampling_params=params, use_tqdm=False)
        written.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert written[0] == written[1] and written[0].count(b"\n") == len(PROMPTS)


def test_asyncio(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=8, seed=5)

    async def answers(llm: LLM) -> list[Any]:
        engine = AsyncLLM(llm)

        async def last(number: int) -> Any:
            found = None
            async for output in engine.generate(TEXTS[number], params, request_id=str(number)):
                found = output
            return found

        try:
            return await asyncio.gather(*map(last, range(4)))
        finally:
            engine.shutdown()

    found = [[item.outputs[0].token_ids for item in asyncio.run(answers(llm))] for llm in (one, two)]
    assert found[0] == found[1]


def test_ctrl_c_gives_what_there_is_and_leaves_the_replicas(two: LLM, ctrl_c: None) -> None:
    done: list[int] = []

    def interrupt(output: Any) -> None:
        done.append(output.index)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    params = [SamplingParams(temperature=0, max_tokens=2 if index < 8 else 200, ignore_eos=True) for index in range(24)]
    with pytest.raises(GenerationInterrupted) as caught:
        two.generate(PROMPTS, params, use_tqdm=False, on_output=interrupt)
    outputs = caught.value.outputs
    ended = [output for output in outputs if output.finished]
    assert len(outputs) == 24 and len(ended) >= 3 and {output.index for output in ended} >= set(done)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length", "interrupted"}
    assert_idle(two)
    assert all(output.finished for output in two.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_a_step_that_fails_ends_the_call_and_no_other(one: LLM, two: LLM) -> None:
    bad = [SamplingParams(max_tokens=4, extra_args={"fails": index == 5}) for index in range(len(PROMPTS))]
    for llm in (one, two):
        with pytest.raises(LogitsProcessorError, match="no luck"):
            llm.generate(PROMPTS, bad, use_tqdm=False)
    assert_idle(two)
    assert tokens_of(one) == tokens_of(two)


def test_what_replicas_cannot_do_is_told(two: LLM, tmp_path: Path) -> None:
    for call in (
        lambda: two.apply_model(type),
        lambda: two.save_prefix_cache(tmp_path / "cache"),
        lambda: two.expert_load(TEXTS),
        lambda: two.selfcheck(),
        lambda: two.sites(),
        lambda: two.generate(TEXTS, GREEDY, use_tqdm=False, capture="layers.0.output"),
    ):
        with pytest.raises(ValidationError, match="data_parallel_size=1"):
            call()
    with pytest.raises(ValidationError, match="a callable cannot be sent to a replica"):
        two.generate(TEXTS, SamplingParams(logits_processors=[lambda ids, logits: logits]), use_tqdm=False)
    assert_idle(two)
    local = type("Local", (Raises,), {"__module__": "__main__"})
    with pytest.raises(ValidationError, match="cannot import Local from __main__"):
        two.add_logits_processor(local)
    assert two.reset_prefix_cache()
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    for options in ({"profiler_config": profiler}, {"hf_overrides": lambda config: config}):
        with pytest.raises(ValidationError, match="data_parallel_size=1"):
            LLM(data_parallel_size=2, **options)
    with pytest.raises(ValidationError, match="pipeline_parallel_size"):
        LLM(pipeline_parallel_size=2)


def test_a_forked_child_has_no_replicas_and_ends_none(two: LLM) -> None:
    child = os.fork()
    if not child:
        try:
            two.generate(PROMPTS, GREEDY, use_tqdm=False)
        except WorkerDiedError as error:
            os._exit(0 if "of the process that this one was forked from" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)


@pytest.fixture(scope="module")
def three() -> Iterator[LLM]:
    with open_llm(**{**OPTIONS, "logits_processors": [Raises]}, data_parallel_size=3) as llm:
        llm.add_logits_processor(DummyLogitsProcessor)  # one that is started later has it too
        yield llm


def test_replicas_that_die_lose_nothing(
    three: LLM, expected: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the middle of a call, another before the next row of a flow; others take their places; then all die."""
    pids, told = pids_of(three), []

    def kill(output: Any) -> None:
        if not told:
            os.kill(pids[1], signal.SIGKILL)
        told.append(output.index)

    with caplog.at_level(logging.WARNING, "llm"):
        found = plain(three.generate(PROMPTS, ALL, use_tqdm=False, on_output=kill))
    assert found == expected and sorted(told) == list(range(24))
    assert "replica 1 died: it was ended by SIGKILL" in caplog.text and "2 of 3 are left" in caplog.text
    assert "Replica 3 is started in its place (try 1 of 3)." in caplog.text
    assert_gone(pids[1:2])
    flow = three.generate_iter(iter(PROMPTS), SamplingParams(temperature=0, max_tokens=30))
    first = next(flow)
    os.kill(pids[0], signal.SIGKILL)
    assert sorted(item.index for item in (first, *flow)) == list(range(24))
    assert_idle(three)

    os.kill(pids[2], signal.SIGKILL)  # the last of the first ones
    params = [item.clone() for item in ALL]
    for index, item in enumerate(params):
        item.seed = index
    same = plain(three.generate(PROMPTS, params, use_tqdm=False))
    deadline = time.monotonic() + 120
    while not {3, 4, 5} <= set(engine_of(three)._used) and time.monotonic() < deadline:
        assert plain(three.generate(PROMPTS, params, use_tqdm=False)) == same
    assert sorted(engine_of(three)._replicas.alive) == [3, 4, 5]
    assert [item[4][0][0][-1] for item in same[3::8]] == [67] * 3  # the token that the processor leaves

    monkeypatch.setattr("llm.replicas.processes._RESTARTS", 0)
    pids += pids_of(three)
    for pid in pids[3:]:
        os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerDiedError, match="all 3 replicas have died; make a new LLM"):
            three.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_gone(pids)


def test_one_that_was_idle_for_long_is_not_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes past `Replicas.send` is the negative control. One that is then silent is hung."""
    monkeypatch.setenv("LLM_WORKER_TIMEOUT", "2")
    for is_noted in (True, False):
        replicas = Replicas()
        worker = WorkerProcess("workers.echo_role", 0, SCHEMA, name="replica", inbox=replicas.inbox)
        replicas.alive[0], replicas._seats[0] = worker, _Seat(Placement("cpu"), ReplicaArgs(LLMArgs("")))
        replicas.send(0, "echo")
        assert taken(replicas, [0]) == (0, Message("echo", None))
        idle = time.monotonic() + 2.5
        while time.monotonic() < idle:
            assert replicas.take(0.1, []) is None
        (replicas if is_noted else Unnoted(worker)).send(0, "compute", 1.0)
        number, told = taken(replicas, [0])
        if is_noted:
            assert (number, told) == (0, Message("computed", None))
            replicas.send(0, "hang")
            number, told = taken(replicas, [0])
        assert "it has said nothing for" in str(told) and not replicas.alive
        assert_gone([worker.pid])


class Unnoted:
    """Sends as `Replicas` did when it took an idle replica for hung."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    def send(self, number: int, kind: str, body: object) -> None:
        self._worker.send(kind, body)


def taken(replicas: Replicas, busy: list[int]) -> tuple[int, Message | WorkerDiedError]:
    while (found := replicas.take(0.1, busy)) is None:
        pass
    return found


def test_a_model_that_no_replica_can_load_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Exception, match=r"config\.json|model_type|safetensors"):
        LLM(tmp_path, data_parallel_size=2)


def test_vectors_are_those_of_one_process() -> None:
    options: dict[str, Any] = {"runner": "pooling", "convert": "embed", "max_model_len": 64}
    with open_llm(**options) as llm:
        expected = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    with open_llm(**options, data_parallel_size=2) as llm:
        assert [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)] == expected
        assert len({tuple(vector) for vector in expected}) == len(set(PROMPTS))
