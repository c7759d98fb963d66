"""Memory comes back: twenty engines in a row leave the process as the first one left it.

What counts is RssAnon, the private memory of the process; it is read in a fresh interpreter, where nothing else moves.
"""

from __future__ import annotations

import ast
import errno
import gc
import re
import resource
import sys

import pytest
from embedded import PROMPTS, engine_of, open_llm, python, run

import llm
from llm import LLMError, OutOfMemoryError
from llm.platforms import limits

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


# Where memory ends: a sentence, and an engine that goes on.


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 2.00 MiB"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=repr,
)
def test_what_says_that_memory_is_lacking_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096 if kind == resource.RLIMIT_AS else -1, -1))
    with pytest.raises(OutOfMemoryError) as raised, limits.explain_memory_errors("do it"):
        raise error
    said = str(raised.value)
    assert said.startswith("there is not enough memory to do it (") and "and ulimit -v is 4096 bytes; free" in said
    assert raised.value.__cause__ is error and "()" not in said


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOENT, "no file"), LLMError("mine")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, limits.explain_memory_errors("do it"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("resets", [True, False])
def test_a_call_that_runs_out_of_memory_leaves_an_engine_that_goes_on(
    resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*args: object) -> object:
        raise MemoryError

    with open_llm() as opened:
        expected, engine = [output.outputs[0].text for output in run(opened, PROMPTS[:2])], engine_of(opened)
        with monkeypatch.context() as patch, pytest.raises(OutOfMemoryError, match="there is not enough memory to"):
            patch.setattr(engine.runner, "execute", lacking)
            if not resets:
                patch.setattr(engine, "_make_scheduler", lacking)
            run(opened, PROMPTS[:2])
        assert engine.needs_reset is not resets
        assert [output.outputs[0].text for output in run(opened, PROMPTS[:2])] == expected and not engine.needs_reset


LIMITED = """
import os, resource, sys
import tokenizers, torch, transformers
from llm import LLM
mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[1]),) * 2)
try:
    LLM()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("more", [0, 6 << 20])
def test_loading_within_a_limit_ends_with_a_sentence(more: int) -> None:
    """`ulimit -v`, in a process that has PyTorch already."""
    done = python("-c", LIMITED, str(more))
    assert re.match("(OutOfMemoryError|CheckpointError): .*(memory|RAYON)", done.stdout), done.stdout + done.stderr


def test_pytorch_that_cannot_be_mapped_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 << 20, -1))
    error = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    llm._tell_of_limit(error)  # PyTorch is here: it is another error
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError, match=r"PyTorch cannot be loaded \(libtorch.*`ulimit -v` allows .* 3145728 bytes"):
        llm._tell_of_limit(error)
