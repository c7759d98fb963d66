"""Ctrl-C and errors inside a call: the call ends, and the next one is right.

The signals are real. They are raised from inside a step, where a user's Ctrl-C would land.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from embedded import GREEDY, PROMPTS, assert_idle, engine_of, open_llm, run, tokens

from llm import LLM, GenerationInterrupted, SamplingParams
from llm.engine.interrupt import InterruptGuard

ROWS = [*PROMPTS, PROMPTS[0]]
LENGTHS = [6, 2, 4, 9]
PARAMS = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in LENGTHS]
LONG = "And it came to pass in those days, that there went out a decree from Caesar Augustus, that all the world "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """What `ROWS` give when nothing goes wrong."""
    return tokens(run(llm, ROWS, PARAMS))


@pytest.fixture(autouse=True)
def sound_afterwards(ctrl_c: None, llm: LLM, expected: list[list[int]]) -> Iterator[None]:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm)
    assert tokens(run(llm, ROWS, PARAMS)) == expected
    assert_idle(llm)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def at_step(llm: LLM, step: int, action: Callable[[], Any]) -> Iterator[list[int]]:
    """Do something in the middle of a step, counted from 1; yields the steps that were started."""
    runner = engine_of(llm).runner
    execute = runner.execute
    started: list[int] = []

    def hooked(plan: Any) -> Any:
        started.append(len(started) + 1)
        result = execute(plan)
        if len(started) == step:
            action()
        return result

    runner.execute = hooked
    try:
        yield started
    finally:
        del runner.execute


# The first Ctrl-C


def test_ctrl_c_at_every_step_keeps_all_that_was_computed(llm: LLM, expected: list[list[int]]) -> None:
    whole = [output.outputs[0].text for output in run(llm, ROWS, PARAMS)]
    for step in range(1, max(LENGTHS) + 1):
        with at_step(llm, step, press_ctrl_c) as started, pytest.raises(GenerationInterrupted) as caught:
            run(llm, ROWS, PARAMS)
        assert len(started) == step
        assert isinstance(caught.value, KeyboardInterrupt)
        done = [length <= step for length in LENGTHS]
        assert f"with {sum(done)} of {len(ROWS)} prompts" in str(caught.value)
        outputs = caught.value.outputs
        assert [output.prompt for output in outputs] == ROWS
        assert [output.finished for output in outputs] == done
        assert [output.outputs[0].finish_reason == "length" for output in outputs] == done
        assert {output.outputs[0].finish_reason for output in outputs} <= {"length", "interrupted"}
        assert tokens(outputs) == [answer[:step] for answer in expected]
        for output, text in zip(outputs, whole, strict=True):
            assert text.startswith(output.outputs[0].text) and output.outputs[0].text
        with at_step(llm, step, press_ctrl_c):
            returned = llm.generate(ROWS, PARAMS, use_tqdm=False, on_interrupt="return")
        assert [output.outputs for output in returned] == [output.outputs for output in outputs]
        assert llm.last_outputs == returned


def test_rows_that_wait_are_in_the_outputs_of_an_interrupted_call() -> None:
    with open_llm(max_num_seqs=1) as llm, at_step(llm, 3, press_ctrl_c):
        outputs = llm.generate(ROWS, PARAMS, use_tqdm=False, on_interrupt="return")
    assert [len(ids) for ids in tokens(outputs)] == [3, 0, 0, 0]
    assert [output.outputs[0].finish_reason for output in outputs] == ["interrupted"] * 4
    assert [output.prompt for output in outputs] == ROWS and outputs[3].prompt_token_ids


def test_a_notebook_shows_one_line() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shown: list[str] = []
    shell._showtraceback = lambda kind, error, lines: shown.extend(lines)  # type: ignore[method-assign]
    shell.run_cell("from llm import GenerationInterrupted\nraise GenerationInterrupted([None, None])")
    (line,) = shown
    assert line.startswith("GenerationInterrupted: interrupted with 0 of 2 prompts") and "last_outputs" in line


def test_a_call_that_fails_leaves_its_outputs_behind(llm: LLM, expected: list[list[int]]) -> None:
    with failing_forward(llm, 5), pytest.raises(RuntimeError, match="planted"):
        run(llm, ROWS, PARAMS)
    assert tokens(llm.last_outputs) == [answer[:4] for answer in expected]
    assert [output.finished for output in llm.last_outputs] == [length < 5 for length in LENGTHS]


def test_no_step_is_interrupted_without_a_signal(llm: LLM) -> None:
    with at_step(llm, 2, lambda: None) as started:
        run(llm, ROWS, PARAMS)
    assert len(started) == max(LENGTHS)


def test_ctrl_c_while_rows_are_added_leaves_none_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llm)
    add, added = engine.add, []

    def hooked(row: Any, **options: Any) -> Any:
        added.append(row)
        if len(added) == 2:
            press_ctrl_c()
        return add(row, **options)

    with monkeypatch.context() as patch, pytest.raises(GenerationInterrupted) as caught:
        patch.setattr(engine, "add", hooked)
        run(llm, ROWS, PARAMS)
    assert len(caught.value.outputs) == len(ROWS)


def test_ctrl_c_while_the_outputs_are_made_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = sys.modules["llm.calls.batch"].Progress
    with monkeypatch.context() as patch, pytest.raises(GenerationInterrupted) as caught:
        patch.setattr(progress, "close", lambda self: press_ctrl_c())
        run(llm, ROWS, PARAMS)
    assert [output.outputs[0].finish_reason for output in caught.value.outputs] == ["length"] * 4


def test_a_suspended_stream_survives_the_ctrl_c_of_another_call(llm: LLM) -> None:
    text = run(llm, PROMPTS[0], PARAMS[3])[0].outputs[0].text
    stream = llm.stream(PROMPTS[0], PARAMS[3])
    first = next(stream)
    with at_step(llm, 3, press_ctrl_c), pytest.raises(GenerationInterrupted):
        run(llm, ROWS, PARAMS)
    assert first + "".join(stream) == text


def test_ctrl_c_in_a_stream(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS[3])
    with at_step(llm, 3, press_ctrl_c) as started, pytest.raises(GenerationInterrupted) as caught:
        list(stream)
    assert len(started) == 3
    [output] = caught.value.outputs
    assert output.outputs[0].finish_reason == "interrupted" and len(output.outputs[0].token_ids) == 3
    with pytest.raises(StopIteration):
        next(stream)


def test_ctrl_c_while_a_stream_is_suspended_is_pythons_own(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS[3])
    next(stream)
    with pytest.raises(KeyboardInterrupt) as caught:
        press_ctrl_c()
    assert not isinstance(caught.value, GenerationInterrupted)
    stream.close()


# Those that follow


@pytest.mark.parametrize("step", [1, 4])
def test_a_second_ctrl_c_is_immediate(llm: LLM, step: int) -> None:
    reached = []

    def press_twice() -> None:
        press_ctrl_c()
        reached.append("first")
        press_ctrl_c()
        reached.append("second")

    with at_step(llm, step, press_twice) as started, pytest.raises(KeyboardInterrupt) as caught:
        run(llm, ROWS, PARAMS)
    assert not isinstance(caught.value, GenerationInterrupted)
    assert reached == ["first"]
    assert len(started) == step


def test_pressing_on_does_not_tear_the_cleanup_apart(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llm)
    cleaned = []

    def pressed_during(method: Callable[..., None]) -> Callable[..., None]:
        def hooked(*args: Any) -> None:
            press_ctrl_c()
            cleaned.append(method(*args))

        return hooked

    for name in ("reset", "abort"):
        monkeypatch.setattr(engine, name, pressed_during(getattr(engine, name)))
    with at_step(llm, 2, press_ctrl_c), pytest.raises(GenerationInterrupted):
        run(llm, ROWS, PARAMS)
    assert len(cleaned) == 1
    with at_step(llm, 2, lambda: (press_ctrl_c(), press_ctrl_c())), pytest.raises(KeyboardInterrupt):
        run(llm, ROWS, PARAMS)
    assert len(cleaned) == 3  # the step's reset and the call's
    monkeypatch.undo()


def engine_lines(frame: FrameType) -> bool:
    """Whether a frame is the engine's own code: the lines where half of a change can be done.

    Not the guard's: its handler is what raises, and never in there; see the test of signals while it leaves.
    """
    name = frame.f_globals.get("__name__", "")
    is_engine = name.startswith(("llm.eng", "llm.llm", "llm.calls")) and name != InterruptGuard.__module__
    return "/llm/" in frame.f_code.co_filename and is_engine


def interrupted_at_line(llm: LLM, line: int) -> int:
    """Run `ROWS` and raise KeyboardInterrupt at the n-th line of the engine; returns the lines that were run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not engine_lines(frame):
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(llm, ROWS, PARAMS)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


def test_an_interruption_anywhere_leaves_a_sound_engine(llm: LLM, expected: list[list[int]]) -> None:
    llm.reset_prefix_cache()
    lines = interrupted_at_line(llm, -1)
    assert lines > 1000
    for line in range(20, lines, lines // 15):
        llm.reset_prefix_cache()
        assert interrupted_at_line(llm, line) == line
        assert_idle(llm)
        assert tokens(run(llm, ROWS, PARAMS)) == expected


def test_signals_while_the_guard_leaves_do_not_leave_its_handler_behind() -> None:
    lines = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not InterruptGuard.__exit__.__code__:
            return None
        if event == "line" and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            lines.append(frame.f_lineno)
            for _ in range(2):
                guard._handle(signal.SIGINT, frame)  # as Python calls it for a signal at this line
        return trace

    before = sys.gettrace()
    with InterruptGuard() as guard:
        sys.settrace(trace)
    sys.settrace(before)
    assert len(lines) >= 2 and guard.requested
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_while_a_row_moves_in_the_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(source: int, target: int) -> None:
        raise KeyboardInterrupt  # the row that left is half gone

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine_of(llm).runner.batch, "_move", move)
        run(llm, ROWS, PARAMS)


# Whose handler it is


def test_the_handler_is_there_only_during_a_call(llm: LLM) -> None:
    handlers = []
    with at_step(llm, 1, lambda: handlers.append(signal.getsignal(signal.SIGINT))):
        run(llm, ROWS, PARAMS)
    assert isinstance(handlers[0].__self__, InterruptGuard)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stream.close()


def test_no_handler_is_installed_on_another_thread(llm: LLM, expected: list[list[int]]) -> None:
    handlers, results = [], []
    with at_step(llm, 1, lambda: handlers.append(signal.getsignal(signal.SIGINT))):
        thread = threading.Thread(target=lambda: results.append(tokens(run(llm, ROWS, PARAMS))))
        thread.start()
        thread.join()
    assert handlers == [signal.default_int_handler]
    assert results == [expected]


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_users_own_handler_is_left_alone(llm: LLM, expected: list[list[int]]) -> None:
    pressed = []
    for handler in (lambda number, frame: pressed.append(number), signal.SIG_IGN):
        with handled_by(handler), at_step(llm, 2, press_ctrl_c):
            assert tokens(run(llm, ROWS, PARAMS)) == expected
    assert pressed == [signal.SIGINT]


@pytest.mark.parametrize("step", [1, 4])
def test_whatever_the_users_handler_raises_passes_through(llm: LLM, step: int) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("too long")

    with handled_by(handler), at_step(llm, step, press_ctrl_c), pytest.raises(TimeoutError, match="too long"):
        run(llm, ROWS, PARAMS)


# Errors inside a step


@contextmanager
def failing_forward(llm: LLM, step: int) -> Iterator[None]:
    """The model raises in its n-th forward, before it has computed anything."""
    model = engine_of(llm).runner.model
    forward, count = model.forward, [0]

    def hooked(batch: Any) -> Any:
        count[0] += 1
        if count[0] == step:
            raise RuntimeError("planted")
        return forward(batch)

    model.forward = hooked
    try:
        yield
    finally:
        del model.forward


@pytest.mark.parametrize("step", [1, 2, 5])
def test_an_error_in_a_step_leaves_a_usable_engine(llm: LLM, step: int) -> None:
    with failing_forward(llm, step), pytest.raises(RuntimeError, match="planted"):
        run(llm, ROWS, PARAMS)


def test_an_error_in_a_stream_leaves_a_usable_engine(llm: LLM) -> None:
    with failing_forward(llm, 3), pytest.raises(RuntimeError, match="planted"):
        list(llm.stream(PROMPTS[0], PARAMS[3]))


def cached_after_a_failed_prefill(llm: LLM) -> int:
    """Prompt tokens that the prefix cache serves although the step that was to compute them failed."""
    llm.reset_prefix_cache()
    with failing_forward(llm, 1), pytest.raises(RuntimeError, match="planted"):
        run(llm, LONG)
    return run(llm, LONG)[0].num_cached_tokens


def test_the_prefix_cache_serves_nothing_that_was_never_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.reset_prefix_cache()
    [whole] = run(llm, LONG)
    assert run(llm, LONG)[0].num_cached_tokens > 0  # once computed, it is served
    assert cached_after_a_failed_prefill(llm) == 0
    assert tokens(run(llm, LONG)) == tokens([whole])
    # With a recovery that keeps the cache, the promised blocks are served.
    with monkeypatch.context() as patch:
        engine = engine_of(llm)
        patch.setattr(engine, "reset", lambda: engine.scheduler.abort(list(engine.scheduler.requests)))
        assert cached_after_a_failed_prefill(llm) > 0
    engine.reset()
    llm.reset_prefix_cache()


def test_an_error_of_the_progress_bar_ends_the_call(llm: LLM) -> None:
    class Bar:
        def __init__(self, **_: object) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def update(self, count: int) -> None:
            raise LookupError("of the bar")

    with pytest.raises(LookupError, match="of the bar"):
        llm.generate(ROWS, PARAMS, use_tqdm=Bar)
