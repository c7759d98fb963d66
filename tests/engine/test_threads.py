"""One call at a time; nothing runs between calls; two engines in one process."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded import GREEDY, PROMPTS, SAMPLED, assert_idle, engine_of, open_llm, python, run, tokens

from llm import LLM, RequestOutput, SamplingParams, ValidationError
from llm.errors import EngineBusyError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Run the jobs at the same time; their results, or the exceptions they raised."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_calls_from_several_threads_are_serialised(llm: LLM) -> None:
    expected = [tokens(run(llm, [prompt] * 3)) for prompt in PROMPTS]
    inside: list[int] = []
    most = []
    step = engine_of(llm).step

    def counted() -> None:
        inside.append(1)
        most.append(len({output for output in engine_of(llm)._completions}))
        step()
        inside.pop()

    engine_of(llm).step = counted
    try:
        jobs = [lambda prompt=prompt: tokens(run(llm, [prompt] * 3)) for prompt in PROMPTS]
        assert in_threads(*jobs) == expected
    finally:
        del engine_of(llm).step
    assert max(most) == 3  # rows of two calls were never in the engine together
    assert_idle(llm)


def test_streams_of_several_threads_share_the_engine(llm: LLM) -> None:
    expected = [run(llm, prompt)[0].outputs[0].text for prompt in PROMPTS]
    jobs = [lambda prompt=prompt: "".join(llm.stream(prompt, GREEDY)) for prompt in PROMPTS]
    assert in_threads(*jobs) == expected
    assert_idle(llm)


def test_a_call_from_inside_a_call_is_refused(llm: LLM) -> None:
    raised: list[BaseException] = []

    class Bar:
        def __init__(self, **_: object) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def update(self, count: int) -> None:
            for call in (lambda: run(llm, "x"), lambda: next(llm.stream("x")), llm.close, llm.reset_prefix_cache):
                try:
                    call()
                except EngineBusyError as error:
                    raised.append(error)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert len(raised) >= 4
    assert len(raised) % 4 == 0
    assert tokens(outputs) == tokens(run(llm, PROMPTS))
    with pytest.raises(EngineBusyError, match="middle of a call"), llm._exclusive():
        run(llm, "x")
    assert_idle(llm)
    assert len(run(llm, PROMPTS)) == 3  # the refusal leaves no trace


def children() -> set[str]:
    """Ids of this process's child processes."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_no_thread_and_no_process_is_left_behind(llm: LLM, use_tqdm: bool) -> None:
    before = set(threading.enumerate()), children()
    llm.generate(PROMPTS, SAMPLED, use_tqdm=use_tqdm)
    assert (set(threading.enumerate()), children()) == before
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert (set(threading.enumerate()), children()) == before  # nor while it is suspended
    stream.close()


def test_the_check_sees_threads_and_processes() -> None:
    before = set(threading.enumerate()), children()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    process = multiprocessing.get_context("spawn").Process(target=int)
    thread.start()
    process.start()
    try:
        assert set(threading.enumerate()) - before[0] == {thread}
        assert str(process.pid) in children() - before[1]
    finally:
        done.set()
        thread.join()
        process.join()


PROCESSES = """
import multiprocessing, threading, sys
from pathlib import Path
multiprocessing.set_start_method("spawn")  # under which a lock of multiprocessing starts a process
from llm import LLM, SamplingParams
llm = LLM()
llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=True)
children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
print(children, [thread.name for thread in threading.enumerate()])
"""


def test_no_process_whatever_the_start_method() -> None:
    result = python("-c", PROCESSES)
    assert result.stdout == "[] ['MainThread']\n", result.stderr


FORK = """
import asyncio, os, signal, sys, threading, torch
torch.set_num_threads(2)
from llm import LLM, AsyncLLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=4)
def answer(llm): return llm.generate(["In the beginning"] * 8, params, use_tqdm=False)[0].outputs[0].token_ids
llm = LLM()
expected = answer(llm)
child = os.fork()
if not child:
    signal.alarm(60)  # it would wait for threads that do not exist
    same = answer(llm) == expected
    torch.set_num_threads(2)  # as a library may do that knows nothing of it
    same = same and answer(llm) == expected
    torch.set_num_threads(1)
    with LLM() as own:
        same = same and answer(own) == expected
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer(llm) == expected, torch.get_num_threads())

async def ask(engine):
    return [each async for each in engine.generate("In the beginning", params)][-1].outputs[0].token_ids
def in_child(work):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if work() else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
# While the thread of an AsyncLLM waits: its child's is a new one.
engine = AsyncLLM(llm)
asyncio.run(ask(engine))
print(in_child(lambda: asyncio.run(ask(engine)) == expected), asyncio.run(ask(engine)) == expected)
# In the middle of another thread's call, and of one's own.
each = [params, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)]
inside, forked = threading.Event(), threading.Event()
def hold(*given):
    inside.set()
    forked.wait(600)
def same():
    both = answer(llm) == asyncio.run(ask(engine)) == expected
    return both and not llm._engine.scheduler.has_unfinished()
caller = threading.Thread(target=lambda: llm.generate(["The king", "And"], each, use_tqdm=False, on_output=hold))
caller.start()
inside.wait(600)
print(len(llm._engine.scheduler.requests), in_child(same))
forked.set()
caller.join()
codes = []
def within(output):
    codes.append(in_child(lambda: True))
llm.generate("The king", params, use_tqdm=False, on_output=within)
print(codes, answer(llm) == expected)
"""


def test_a_forked_process_computes_with_one_thread_and_says_so() -> None:
    """Threads are not forked: without care the child would wait for ever, for OpenMP's or for a lock of another one."""
    result = python("-c", FORK, env={"OMP_NUM_THREADS": "2"})
    assert result.stdout == "0 True 2\n0 True\n1 0\n[0] True\n", result.stderr
    assert result.stderr.count("so it computes with one thread") == 3


def test_the_lowest_priority_value_runs_first() -> None:
    """And is the last to be recomputed where the KV cache is too small for all; answers are the same."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    order: list[int] = []

    def ran(llm: LLM, **more: Any) -> list[RequestOutput]:
        order.clear()
        return llm.generate(PROMPTS, params, use_tqdm=False, on_output=lambda out: order.append(out.index), **more)

    with open_llm(max_model_len=64, max_num_seqs=1, scheduling_policy="priority") as llm:
        expected = tokens(ran(llm))
        assert order == [0, 1, 2]
        assert tokens(ran(llm, priority=[3, 1, 2])) == expected and order == [1, 2, 0]
        assert tokens(ran(llm, priority=1)) == expected and order == [0, 1, 2]
        engine = llm.llm_engine
        for index, own in enumerate((5, -1, 0)):
            engine.add_request(str(index), PROMPTS[index], params, priority=own)
        ended = [output.request_id for _ in range(200) for output in engine.step() if output.finished]
        assert ended == ["1", "2", "0"]
        with pytest.raises(ValidationError, match="priority must be an integer from"):
            ran(llm, priority=True)
    small = {"max_model_len": 64, "block_size": 4, "enable_prefix_caching": False, "kv_cache_dtype": "float32"}
    with open_llm(**small) as plan:
        block = plan.config.cache_config.kv_cache_memory_bytes // plan.config.cache_config.num_blocks
    for policy, victim, first in (("priority", 0, 1), ("fcfs", 2, 0)):
        with open_llm(**small, kv_cache_memory_bytes=20 * block, scheduling_policy=policy) as llm:
            outputs = ran(llm, priority=[9, 1, 2])
            counts = [output.metrics.num_preemptions for output in outputs]
            assert tokens(outputs) == expected and counts[victim] == max(counts) > 0 == counts[first]
            assert_idle(llm)


def test_a_loaded_model_is_not_pickled(llm: LLM) -> None:
    """What a process pool would try with a bound method, and `copy` too."""
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied; build one in each process"):
            attempt(llm)  # type: ignore[operator]


def test_two_engines_side_by_side(llm: LLM) -> None:
    expected = tokens(run(llm, PROMPTS))
    params = SamplingParams(temperature=0, max_tokens=12)
    with open_llm(max_num_seqs=1, block_size=4, seed=1) as other:
        stream = llm.stream(PROMPTS[0], params)
        pieces = [next(stream)]
        assert tokens(run(other, PROMPTS)) == expected
        both = in_threads(lambda: tokens(run(llm, PROMPTS)), lambda: tokens(run(other, PROMPTS)))
        assert both == [expected, expected]
        assert other.config.cache_config.block_size == 4
        assert llm.config.cache_config.block_size == 16
        other.close()
        assert "".join([*pieces, *stream]) == run(llm, PROMPTS[0])[0].outputs[0].text
    assert_idle(llm)
