"""Memory comes back: twenty engines in a row leave the process as the first one left it.

What counts is RssAnon, the private memory of the process; it is read in a fresh interpreter, where nothing else moves.
"""

from __future__ import annotations

import ast
import gc

from embedded import PROMPTS, engine_of, open_llm, python, run

ROUNDS = """
import sys
from llm import LLM, SamplingParams

def private_memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def use(llm):
    llm.generate(["In the beginning", "And the"] * 10, SamplingParams(max_tokens=8, top_p=0.9), use_tqdm=False)

def closed():
    llm = LLM()
    use(llm)
    llm.close()

def deleted():
    llm = LLM()
    use(llm)

def failed():
    llm = LLM()
    use(llm)
    llm._engine.runner.sampler = None
    try:
        use(llm)
    except TypeError as error:
        sys.last_traceback = error.__traceback__  # as a notebook does: it keeps all that the error's frames refer to
    llm.close()

kept = []

def leaked():
    llm = LLM()
    use(llm)
    kept.append(llm)

def rounds(kind, count):
    after = []
    for _ in range(count):
        kind()
        after.append(private_memory())
    return after

print([rounds(closed, 20), rounds(deleted, 5), rounds(failed, 8), rounds(leaked, 4)])
"""


def test_memory_comes_back_and_a_leak_would_be_seen() -> None:
    result = python("-c", ROUNDS)
    assert result.returncode == 0, result.stderr
    closed, deleted, failed, leaked = ast.literal_eval(result.stdout)
    assert max(closed) <= 1.05 * closed[0]
    assert max(deleted) <= 1.05 * closed[0]
    # The second failure is the first that happens while an older traceback is still kept.
    assert max(failed) <= 1.05 * failed[1]
    assert leaked[-1] > 1.05 * leaked[0]


def test_close_frees_what_somebody_still_refers_to() -> None:
    with open_llm() as llm:
        run(llm, PROMPTS)
        engine = engine_of(llm)
        runner, model, caches = engine.runner, engine.runner.model, list(engine.runner.states)
        held = [*model.parameters(), *model.buffers(), *(tensor for layer in caches for tensor in layer)]
        assert all(tensor.numel() for tensor in held)
        gc.disable()
        try:
            llm.close()
        finally:
            gc.enable()
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
    assert [tensor._base for tensor in held] == [None] * len(held)  # a view would keep the memory
    assert runner.states == []


def test_close_twice() -> None:
    with open_llm() as llm:
        llm.close()
        llm.close()
    llm.close()
