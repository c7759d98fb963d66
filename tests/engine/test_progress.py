"""The progress bar of `generate`: what it counts, and that it stays out of the way."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
from embedded import GREEDY, PROMPTS, engine_of, open_llm, run
from tqdm.auto import tqdm

from llm import LLM, GenerationInterrupted, SamplingParams
from llm.engine import progress
from llm.engine.progress import Progress

PARAMS = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (3, 8, 5)]


class Recorder:
    """Stands for tqdm and keeps what it was told."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, total: int, desc: str, **options: Any) -> None:
        self.n, self.total, self.desc, self.options = 0, total, desc, options
        self.history: list[tuple[int, int, str]] = []
        self.postfix = ""
        self.closed = 0
        Recorder.made.append(self)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def update(self, count: int) -> None:
        self.n += count
        self.history.append((self.n, self.total, self.postfix))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_num_seqs=2) as llm:
        yield llm


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refresh after every step, however fast it was."""
    Recorder.made = []
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_COST_FACTOR", 0)


def test_it_counts_tokens_and_rows(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=Recorder)
    [bar] = Recorder.made
    everything = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    assert bar.n == bar.total == everything
    assert bar.postfix == "rows 3/3 done, 0 running"
    assert bar.closed == 1
    counts = [count for count, _, _ in bar.history]
    assert counts == sorted(counts)
    assert counts[0] > 0  # prompts count while no row has finished
    assert "rows 0/3 done, 2 running" in [postfix for _, _, postfix in bar.history]
    assert "rows 1/3 done, 2 running" in [postfix for _, _, postfix in bar.history]
    assert all(count <= total for count, total, _ in bar.history)


def test_the_total_is_an_estimate_that_improves(llm: LLM) -> None:
    prompts = [[5, 6]] * 6
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (4, 4, 400, 4, 4, 4)]
    # Three times the one token that ends nothing, then any other.
    params[2] = SamplingParams(temperature=0, max_tokens=400, stop_token_ids=list(range(2303)), min_tokens=3)
    llm.generate(prompts, params, use_tqdm=Recorder)
    [bar] = Recorder.made
    totals = [total for _, total, _ in bar.history]
    assert totals[0] == 6 * 2 + 5 * 4 + 400  # at first the most that can come
    assert 6 * 2 + 6 * 4 in totals[:-2]  # then as long as those that have finished
    assert totals[-1] == bar.n == 6 * 2 + 6 * 4


def test_n_completions_are_rows(llm: LLM) -> None:
    llm.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=2), use_tqdm=Recorder)
    assert Recorder.made[0].postfix == "rows 3/3 done, 0 running"


def test_a_preempted_row_does_not_move_it_back() -> None:
    block = 32768
    with open_llm(max_model_len=64, kv_cache_memory_bytes=5 * block, enable_prefix_caching=False) as tight:
        params = SamplingParams(temperature=0, max_tokens=44, ignore_eos=True)
        tight.generate([[5] * 10, [6] * 10], params, use_tqdm=Recorder)
        assert engine_of(tight).scheduler.num_preemptions > 0
    counts = [count for count, _, _ in Recorder.made[0].history]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * 54


def test_false_makes_no_bar_and_no_prompts_make_none(llm: LLM) -> None:
    run(llm, PROMPTS)
    llm.generate([], use_tqdm=Recorder)
    assert Recorder.made == []


def test_a_partial_of_tqdm(llm: LLM) -> None:
    screen = io.StringIO()
    llm.generate(PROMPTS, GREEDY, use_tqdm=partial(tqdm, file=screen, ascii=True, mininterval=0))
    shown = screen.getvalue()
    assert "Generating: 100%" in shown
    assert "rows 3/3 done, 0 running" in shown


def test_the_default_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Generating: 100%" in err
    assert "tokens/s" in err
    assert err.endswith("\n")


class FullDisk(io.StringIO):
    """Takes so many writes."""

    room = 0

    def write(self, text: str) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().write(text)


@pytest.mark.parametrize("writes", [None, 0, 1, 2, 3])
def test_a_bar_that_cannot_be_drawn_does_not_end_the_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, writes: int | None
) -> None:
    """There is no standard error (a service), or it is full, at the start or later."""
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_COST_FACTOR", 0)
    expected = run(llm, PROMPTS, PARAMS)
    error = None if writes is None else FullDisk()
    if isinstance(error, FullDisk):
        error.room = writes or 0
    monkeypatch.setattr("sys.stderr", error)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=True)
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert error is None or error.room <= 0  # it was tried


def test_it_is_closed_when_the_call_ends_badly(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("planted"), GenerationInterrupted([])):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(engine_of(llm).runner, "execute", lambda plan, error=error: (_ for _ in ()).throw(error))
            llm.generate(PROMPTS, GREEDY, use_tqdm=Recorder)
    assert [bar.closed for bar in Recorder.made] == [1, 1]


def test_it_is_not_refreshed_more_often_than_it_is_worth(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.undo()
    monkeypatch.setattr(progress, "monotonic", clock)
    bar = Progress([], False)
    bar._bar = Recorder(0, "x")
    for _ in range(1000):
        bar.update()
    # A refresh takes one tick of this clock, so 200 ticks must pass before the next; asking is a tick, too.
    assert 4 <= len(bar._bar.history) <= 6
    bar.update(force=True)
    assert len(bar._bar.history) <= 7
