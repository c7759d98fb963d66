"""`AsyncLLM`: tasks that come and go get `LLM.generate`'s answers from one batch, and leave nothing behind."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from embedded import PROMPTS, assert_idle, engine_of, open_llm, python, run

from llm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    LLMError,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    ValidationError,
)
from llm.base.locks import FairLock
from llm.errors import EngineClosedError, PromptTooLongError
from llm.inputs import LoRARequest

T = TypeVar("T")
CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 9, "logprobs": 2},
    {"temperature": 1, "seed": 5, "max_tokens": 12, "ignore_eos": True},
]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=64, max_num_seqs=8, num_threads=1) as opened:
        [free] = run(opened, PROMPTS[0], SamplingParams(**PARAMS[0]))
        PARAMS[0]["stop"] = ["nowhere", free.outputs[0].text[12:26]]
        yield opened


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncLLM]:
    with AsyncLLM(llm) as made:
        yield made
    assert_idle(llm)


def timed(what: Coroutine[Any, Any, T]) -> T:
    """Run it in a new event loop; a hang is an error."""
    return asyncio.run(asyncio.wait_for(what, 600))


async def told(engine: AsyncLLM, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


async def first(engine: AsyncLLM, *args: Any) -> RequestOutput:
    async with aclosing(engine.generate(*args)) as outputs:
        return await anext(outputs)


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by a step's number of requests with each step."""
    steps: list[int] = []
    execute = engine_of(llm).runner.execute

    def counted(plan: Any) -> Any:
        steps.append(len(plan.num_scheduled_tokens))
        return execute(plan)

    monkeypatch.setattr(engine_of(llm).runner, "execute", counted)
    return steps


class Gate:
    """Holds the engine in a step, so that a test on a busy machine is not too late for a request."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        self.opened = threading.Event()
        self._execute = engine_of(llm).runner.execute
        monkeypatch.setattr(engine_of(llm).runner, "execute", self._step)

    def close_after(self, steps: int) -> None:
        self.opened.clear()
        self.left = steps

    def _step(self, plan: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            assert self.opened.wait(600), "nobody opened the gate"
        return self._execute(plan)


async def turns() -> None:
    """Let what was handed to the event loop reach the engine thread."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_gathered_requests_are_answered_as_by_generate(llm: LLM, engine: AsyncLLM, kind: RequestOutputKind) -> None:
    expected = run(llm, PROMPTS, [SamplingParams(**own) for own in PARAMS])
    assert expected[0].outputs[0].stop_reason == PARAMS[0]["stop"][1]

    async def gather() -> list[list[RequestOutput]]:
        params = [SamplingParams(**own, output_kind=kind) for own in PARAMS]
        pairs = enumerate(zip(PROMPTS, params, strict=True))
        return await asyncio.gather(*(told(engine, prompt, own, str(index)) for index, (prompt, own) in pairs))

    for index, (outputs, whole) in enumerate(zip(timed(gather()), expected, strict=True)):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {str(index)}
        assert outputs[0].prompt == PROMPTS[index] and (len(outputs) == 1) == (kind is FINAL)
        for place, completion in enumerate(whole.outputs):
            parts = [output.outputs[place] for output in outputs]
            if kind is DELTA:
                assert "".join(part.text for part in parts) == completion.text
                assert [token for part in parts for token in part.token_ids] == completion.token_ids
                assert completion.logprobs is None or completion.logprobs == [
                    item for part in parts for item in part.logprobs or []
                ]
            else:
                assert all(completion.text.startswith(part.text) for part in parts)
                assert (parts[-1].text, parts[-1].token_ids) == (completion.text, completion.token_ids)
                assert parts[-1].logprobs == completion.logprobs
            assert parts[-1].finish_reason == completion.finish_reason


def test_where_telling_would_take_long_beginnings_and_ends_are_told_at_once(llm: LLM, engine: AsyncLLM) -> None:
    engine._thread._tell_at = float("inf")

    async def gather() -> list[list[RequestOutput]]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=DELTA)
        return await asyncio.gather(*(told(engine, [5, 6, 7 + row], params) for row in range(3)))

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for row, outputs in enumerate(timed(gather())):
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 7]
        [whole] = run(llm, [[5, 6, 7 + row]], greedy)
        assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text


def test_gathered_requests_share_a_batch_and_others_join_it(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = steps_of(llm, monkeypatch)
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def gather() -> None:
        await asyncio.gather(*(told(engine, [5, 6, 7 + row], short) for row in range(6)))

    timed(gather())
    assert steps == [6] * 6

    gate = Gate(llm, monkeypatch)

    async def join() -> None:
        gate.close_after(3)
        async with aclosing(engine.generate([5, 6], LONG)) as outputs:
            await anext(outputs)
            late = asyncio.create_task(told(engine, [8, 9], short))
            await turns()
            gate.opened.set()
            number = [len(output.outputs[0].token_ids) async for output in outputs][-1]
        assert late.done() and number == 40

    steps.clear()
    timed(join())
    assert len(steps) == 40 and steps.count(2) == 6

    async def in_turn() -> None:
        for row in range(3):
            await told(engine, [5, 6, 7 + row], short)

    steps.clear()
    timed(in_turn())
    assert steps == [1] * 18


def test_a_slow_task_gets_fewer_and_longer_outputs(llm: LLM, engine: AsyncLLM) -> None:
    [whole] = run(llm, PROMPTS[1], LONG)

    async def read_slowly() -> list[RequestOutput]:
        params = LONG.clone()
        params.output_kind = DELTA
        outputs = []
        async for output in engine.generate(PROMPTS[1], params, "slow"):
            outputs.append(output)
            while len(outputs) == 1 and not whole_is_computed():
                await asyncio.sleep(0.001)
        return outputs

    def whole_is_computed() -> bool:
        return not engine_of(llm).scheduler.has_unfinished()

    outputs = timed(read_slowly())
    assert len(outputs) <= 3 and "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text


def test_an_aborted_request_ends_with_what_there_is(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = run(llm, PROMPTS[0], LONG)
    gate = Gate(llm, monkeypatch)
    gate.close_after(5)

    async def abort() -> tuple[RequestOutput, list[RequestOutput]]:
        other = asyncio.create_task(told(engine, PROMPTS[1], LONG, "other"))
        outputs = []
        async for output in engine.generate(PROMPTS[0], LONG, "a"):
            outputs.append(output)
            if not gate.opened.is_set():
                await engine.abort(["a", "nobody"])
                await turns()
                gate.opened.set()
        return outputs[-1], await other

    aborted, other = timed(abort())
    [own] = aborted.outputs
    assert aborted.finished and own.finish_reason == "abort" and 1 <= len(own.token_ids) < 8
    assert whole.outputs[0].token_ids[: len(own.token_ids)] == own.token_ids
    assert other[-1].outputs[0].finish_reason == "length"


def test_whoever_leaves_or_is_cancelled_frees_its_blocks(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(llm, monkeypatch)

    async def leave() -> None:
        await first(engine, PROMPTS[0], LONG)
        async for _ in engine.generate(PROMPTS[0], LONG):
            break
        while engine_of(llm).scheduler.has_unfinished():
            await asyncio.sleep(0.001)
        gate.close_after(3)
        task = asyncio.create_task(told(engine, PROMPTS[1], LONG))
        waits = asyncio.create_task(told(engine, PROMPTS[1], LONG))
        await first(engine, PROMPTS[2], LONG)
        for each in (task, waits):
            each.cancel()
        unstarted = asyncio.create_task(told(engine, PROMPTS[1], LONG))
        await asyncio.sleep(0)
        unstarted.cancel()
        assert [type(end) for end in await asyncio.gather(task, waits, unstarted, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 3
        gate.opened.set()
        for _ in range(2):  # whoever has left was dropped before the second
            await told(engine, PROMPTS[2], SamplingParams(max_tokens=1))
        assert not engine_of(llm).scheduler.has_unfinished()

    timed(leave())
    assert_idle(llm)


def test_requests_of_a_closed_event_loop_are_dropped(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can be told: they leave the batch, and requests of other loops go on."""
    gate = Gate(llm, monkeypatch)
    gate.close_after(3)
    loop = asyncio.new_event_loop()
    left = loop.create_task(told(engine, PROMPTS[0], LONG))
    loop.run_until_complete(first(engine, PROMPTS[1], LONG))
    loop.close()
    gate.opened.set()
    for _ in range(2):  # whoever has left was dropped before the second
        assert timed(told(engine, PROMPTS[2], SamplingParams(max_tokens=1)))[-1].finished
    assert not engine_of(llm).scheduler.has_unfinished() and not left.done()
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # it is this test's intention


def test_a_bad_request_is_its_callers_alone(llm: LLM, engine: AsyncLLM) -> None:
    def fails(tokens: list[int], logits: Any) -> Any:
        raise KeyError("my own")

    async def gather() -> list[Any]:
        tasks = [
            told(engine, PROMPTS[0], LONG, "a"),
            told(engine, [5] * 99, LONG),
            told(engine, PROMPTS, LONG),
            told(engine, PROMPTS[1], LONG, "a"),
            told(engine, PROMPTS[1], LONG, 3),
            told(engine, {"no": "text"}, LONG),
            told(engine, PROMPTS[2], SamplingParams(max_tokens=4, logits_processors=[fails])),
        ]
        return await asyncio.gather(*tasks, return_exceptions=True)

    good, long, many, same, number, strange, own = timed(gather())
    assert good[-1].outputs[0].token_ids == run(llm, PROMPTS[0], LONG)[0].outputs[0].token_ids
    assert isinstance(long, PromptTooLongError) and isinstance(own[-1].error, KeyError)
    for error, said in ((many, "takes one prompt, got 3"), (same, "id of no unfinished"), (number, "must be a text")):
        assert isinstance(error, ValidationError) and said in str(error)
    assert isinstance(strange, ValidationError)


def test_a_failure_of_the_engine_reaches_everybody_and_the_next_request_runs(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = engine_of(llm).runner.execute

    def fail(plan: Any) -> Any:
        monkeypatch.setattr(engine_of(llm).runner, "execute", execute)
        raise RuntimeError("planted")

    async def gather() -> list[Any]:
        monkeypatch.setattr(engine_of(llm).runner, "execute", fail)
        return await asyncio.gather(*(told(engine, prompt, LONG) for prompt in PROMPTS), return_exceptions=True)

    errors = timed(gather())
    assert len({id(error) for error in errors}) == 3
    assert all(type(error) is LLMError and "RuntimeError: planted" in str(error) for error in errors)
    assert {error.__cause__ for error in errors} == {engine.dead_error} and engine.dead_error is not None
    [after] = timed(told(engine, PROMPTS[0], SamplingParams(max_tokens=2, output_kind=FINAL)))
    assert after.finished and engine.is_running and not engine.errored


@pytest.mark.parametrize(
    "ends", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_what_would_end_a_program_ends_requests_and_not_the_thread(
    llm: LLM, engine: AsyncLLM, ends: BaseException
) -> None:
    def leaves(tokens: list[int], logits: Any) -> Any:
        if len(tokens) == 3:
            raise ends
        return logits

    async def gather() -> list[Any]:
        own = SamplingParams(max_tokens=9, ignore_eos=True, logits_processors=[leaves])
        tasks = [told(engine, PROMPTS[0], LONG), told(engine, PROMPTS[1], own)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in timed(gather()):
        assert type(error) is LLMError and f"({type(ends).__name__}" in str(error)
        assert error.__cause__ is ends is engine.dead_error
    timed(engine.check_health())
    [after] = timed(told(engine, PROMPTS[0], SamplingParams(max_tokens=2, output_kind=FINAL)))
    assert after.finished and engine.is_running and not engine.errored


def test_a_thread_that_ends_all_the_same_ends_its_requests_with_the_reason(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncLLM(llm)
    advance, planted = engine._thread._advance, threading.Event()

    def fail(commands: Any) -> None:
        advance(commands)
        if planted.is_set():
            raise MemoryError("planted")

    monkeypatch.setattr(engine._thread, "_advance", fail)

    async def generate() -> None:
        async with aclosing(engine.generate(PROMPTS[0], LONG)) as outputs:
            await anext(outputs)
            planted.set()
            with pytest.raises(EngineClosedError, match=r"thread of this AsyncLLM has ended \(MemoryError: planted\)"):
                while True:
                    await anext(outputs)
        with pytest.raises(EngineClosedError, match="MemoryError: planted"):
            await told(engine, PROMPTS[1], LONG)
        with pytest.raises(EngineClosedError, match="MemoryError: planted"):
            await engine.check_health()

    timed(generate())
    assert engine.errored and engine.is_stopped and not engine.is_running
    assert isinstance(engine.dead_error, MemoryError)
    engine.shutdown()
    run(llm, PROMPTS[0], SamplingParams(max_tokens=1))  # what the thread left in the engine is dropped
    assert_idle(llm)


def test_a_thread_that_cannot_start_is_said_and_the_next_one_may(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(LLMError, match="can't start new thread"):
            timed(told(engine, PROMPTS[0], LONG))
    assert timed(told(engine, PROMPTS[0], SamplingParams(max_tokens=2)))[-1].finished


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_generation_pauses_and_goes_on(llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """No step is computed while it is paused, and whoever comes meanwhile is answered afterwards."""
    expected = [output.outputs[0].token_ids for output in run(llm, PROMPTS, LONG)]
    steps = steps_of(llm, monkeypatch)

    async def generate() -> tuple[Any, Any, int]:
        running = asyncio.create_task(told(engine, PROMPTS[0], LONG, "a"))
        while not steps:
            await asyncio.sleep(0.001)
        await engine.pause_generation(mode=mode, clear_cache=mode != "keep")
        assert await engine.is_paused()
        count = len(steps)
        later = asyncio.create_task(told(engine, PROMPTS[1], LONG, "b"))
        gone = asyncio.create_task(told(engine, PROMPTS[2], LONG, "c"))
        await asyncio.sleep(0.05)
        gone.cancel()
        assert len(steps) == count and not later.done()
        assert running.done() == (mode != "keep")
        await engine.resume_generation()
        return (await running)[-1].outputs[0], (await later)[-1].outputs[0], count

    first_output, second, count = timed(generate())
    assert second.token_ids == expected[1] and len(steps) > count
    if mode == "abort":
        assert first_output.finish_reason == "abort"
        assert first_output.token_ids == expected[0][: len(first_output.token_ids)]
    else:
        assert first_output.token_ids == expected[0]
    with pytest.raises(ValidationError, match="mode must be 'abort' or 'wait' or 'keep'"):
        timed(engine.pause_generation(mode="stop"))


def test_adapters_and_vectors_are_asked_for_as_of_vllm(engine: AsyncLLM) -> None:
    async def encode(asked: AsyncLLM) -> list[Any]:
        return [output async for output in asked.encode(PROMPTS[0], PoolingParams(task="embed"), "mine")]

    with pytest.raises(ValidationError, match="enable_lora"):
        timed(engine.add_lora(LoRARequest("a", 1, "/nowhere")))
    with pytest.raises(ValidationError, match="this model generates text"):
        timed(encode(engine))


@pytest.fixture(scope="module")
def pooling() -> Iterator[LLM]:
    with open_llm(runner="pooling", max_model_len=64, max_num_seqs=8, num_threads=1) as opened:
        yield opened


async def encoded(engine: AsyncLLM, *args: Any) -> Any:
    [output] = [output async for output in engine.encode(*args)]
    return output


def test_prompts_of_several_tasks_are_encoded_in_the_same_steps(pooling: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = [output.outputs.embedding for output in pooling.embed(PROMPTS, use_tqdm=False)]
    steps, embed = steps_of(pooling, monkeypatch), PoolingParams(task="embed")

    async def several(engine: AsyncLLM) -> list[Any]:
        calls = [encoded(engine, prompt, embed, f"id-{index}") for index, prompt in enumerate(PROMPTS)]
        by_token = encoded(engine, PROMPTS[0])
        wrong = encoded(engine, "x", PoolingParams(task="classify"))
        return await asyncio.gather(*calls, by_token, wrong, return_exceptions=True)

    with AsyncLLM(pooling) as engine:
        *outputs, by_token, wrong = timed(several(engine))
    assert steps == [len(PROMPTS) + 1]
    assert [output.outputs.data.tolist() for output in outputs] == vectors
    assert [output.request_id for output in outputs] == [f"id-{index}" for index in range(len(PROMPTS))]
    assert by_token.outputs.data.shape == (len(by_token.prompt_token_ids), len(vectors[0]))
    assert isinstance(wrong, ValidationError) and wrong.parameter == "pooling_task"
    assert_idle(pooling)


def test_a_prompt_to_encode_may_be_aborted_or_left(pooling: LLM) -> None:
    async def ended(engine: AsyncLLM) -> list[Any]:
        await engine.pause_generation()
        tasks = [asyncio.create_task(encoded(engine, prompt, None, prompt)) for prompt in PROMPTS[:3]]
        await asyncio.sleep(0)
        await engine.abort(PROMPTS[0])
        await asyncio.sleep(0)
        tasks[1].cancel()
        await engine.resume_generation()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with AsyncLLM(pooling) as engine:
        aborted, left, whole = timed(ended(engine))
    assert isinstance(aborted, LLMError) and "aborted" in str(aborted)
    assert isinstance(left, asyncio.CancelledError) and whole.finished
    assert_idle(pooling)


def test_the_event_loop_runs_while_a_prompt_is_tokenized(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, turned = llm._preprocessor.checked_rows, threading.Event()

    def slow(*args: Any) -> Any:
        assert turned.wait(600), "the event loop stood still"
        assert threading.current_thread().name == "llm-engine"
        return rows(*args)

    async def generate() -> list[RequestOutput]:
        monkeypatch.setattr(llm._preprocessor, "checked_rows", slow)
        asyncio.get_running_loop().call_later(0.01, turned.set)
        return await told(engine, PROMPTS[0], SamplingParams(max_tokens=2))

    assert timed(generate())[-1].finished


def in_turn(lock: Any) -> bool:
    """True if a thread that waits comes before the one that has just released the lock."""
    order: list[str] = []

    def wait() -> None:
        waits.set()
        with lock:
            order.append("waits")

    waits, other = threading.Event(), threading.Thread(target=wait)
    with lock:
        other.start()
        waits.wait()
        time.sleep(0.01)  # until it asks for the lock
    with lock:
        order.append("takes it again")
    other.join()
    return order[0] == "waits"


def test_the_lock_of_calls_goes_to_who_waits() -> None:
    """A thread that steps again and again would keep it."""
    lock = FairLock()
    assert all(in_turn(lock) for _ in range(10))
    # Python's own, which since 3.14 is handed over to one that has waited for a millisecond.
    assert sys.version_info >= (3, 14) or not all(in_turn(threading.RLock()) for _ in range(10))
    with lock:
        assert lock.acquire() and lock._is_owned()
        lock.release()
    assert lock.acquire(blocking=False) and not lock._next.locked()
    lock.release()
    assert not lock._is_owned()


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_signal_while_the_lock_is_taken_leaves_it_free(place: str) -> None:
    class Interrupted(FairLock):
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if place == "after":
                super().acquire()
            raise KeyboardInterrupt

    lock = Interrupted()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    assert not lock._is_owned()


def test_another_call_on_the_llm_fails_and_the_request_says_so(
    llm: LLM, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, left = engine_of(llm).step, [3]

    def fails_once() -> None:
        left[0] -= 1
        return engine_of(llm).reset() if left[0] == 0 else step()

    monkeypatch.setattr(engine_of(llm), "step", fails_once)

    async def generate() -> None:
        async with aclosing(engine.generate(PROMPTS[0], LONG)) as outputs:
            with pytest.raises(LLMError, match="another call on its LLM failed"):
                while True:
                    await anext(outputs)

    timed(generate())


def test_shutdown_ends_requests_and_closes_only_what_is_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLM(llm)
    gate = Gate(llm, monkeypatch)
    gate.close_after(5)

    async def shut_down() -> None:
        async with aclosing(engine.generate(PROMPTS[0], LONG)) as outputs:
            await anext(outputs)
            threading.Timer(0.05, gate.opened.set).start()
            engine.shutdown()
            with pytest.raises(EngineClosedError, match="shut down"):
                while True:
                    await anext(outputs)
        with pytest.raises(EngineClosedError, match="shut down"):
            await told(engine, PROMPTS[0], LONG)
        with pytest.raises(EngineClosedError, match="shut down"):
            await engine.check_health()

    timed(shut_down())
    engine.shutdown()
    assert engine.is_stopped and not [item for item in threading.enumerate() if item.name == "llm-engine"]
    assert_idle(llm)

    own = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(max_model_len=48, enable_log_requests=True))
    [output] = timed(told(own, PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, output_kind=FINAL)))
    assert (
        output.outputs[0].token_ids
        == run(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    )
    own.shutdown()
    assert repr(own.llm) == "LLM(closed)"


def test_the_engine_is_collected_and_its_thread_ends(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    timed(told(engine, PROMPTS[0], SamplingParams(max_tokens=1)))
    thread = engine._thread._thread
    assert thread is not None and thread.is_alive()
    del engine
    assert not thread.is_alive()


SCRIPT = """
import asyncio
from llm import LLM, AsyncLLM, SamplingParams
async def main():
    global outputs, engine
    engine = AsyncLLM(LLM(max_model_len=2048, num_threads=1))
    outputs = engine.generate("In the beginning", SamplingParams(temperature=0, ignore_eos=True))
    print(len((await anext(outputs)).outputs[0].token_ids))
loop = asyncio.new_event_loop()
loop.run_until_complete(main())  # and the program ends, amid a request
"""


def test_a_program_ends_amid_a_request() -> None:
    result = python("-c", SCRIPT)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
