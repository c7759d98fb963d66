"""The progress bar of `generate`: what it counts, and that it stays out of the way."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from embedded import GREEDY, PROMPTS, engine_of, open_llm, run
from tqdm.auto import tqdm

from llm import LLM, GenerationInterrupted, SamplingParams
from llm import progress as bar_module
from llm.engine import progress
from llm.engine.progress import Progress
from llm.progress import GenerationProgress

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
    """Show it after every step, however fast it was."""
    Recorder.made = []
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_COST_FACTOR", 0)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)


def test_it_counts_rows_and_tokens(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=Recorder)
    [bar] = Recorder.made
    everything = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    assert bar.n == bar.total == 3
    assert bar.postfix.startswith(f"rows 3/3 done, 0 running, {everything} tokens, 3 stopped by length, in ")
    assert bar.closed == 1
    counts = [count for count, _, _ in bar.history]
    assert counts == sorted(counts)
    postfixes = [postfix for _, _, postfix in bar.history]
    first = next(text for text in postfixes if text.startswith("rows 0/3 done, 2 running"))
    assert "1 waiting" in first and " left" not in first  # tokens count while no row has ended
    assert not any(text.startswith("rows 0/3 done, 2 running, 0 tokens") for text in postfixes[1:])
    assert any(text.startswith("rows 1/3 done, 2 running") and text.endswith(" left") for text in postfixes)
    assert all(count <= total for count, total, _ in bar.history)


def test_the_time_left_is_that_of_the_rows_so_far() -> None:
    """Those that needed no run took no time."""
    ten = GenerationProgress(10, done=4, not_run=2, prompt_tokens=30, generated_tokens=70, seconds=8.0)
    assert ten.seconds_left == 24.0 and ten.expected_tokens == 400
    assert "100 tokens" in str(ten) and str(ten).endswith("8.0 s so far, 24 s left")
    for none_ran in (GenerationProgress(10, done=2, not_run=2, seconds=8.0), GenerationProgress(3)):
        assert none_ran.seconds_left is none_ran.expected_tokens is None and "left" not in str(none_ran)
    assert GenerationProgress(2, done=2, not_run=2).seconds_left == 0.0


def test_a_prompt_with_n_completions_is_a_row(llm: LLM) -> None:
    llm.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=2), use_tqdm=Recorder)
    assert Recorder.made[0].postfix.startswith("rows 1/1 done")


def test_a_callable_gets_what_is_known(llm: LLM) -> None:
    """Rows that fail, that hit the prefix cache, that are cut; the last report is of the end."""
    llm.reset_prefix_cache()
    found: list[GenerationProgress] = []
    rows = [[7] * 40, [7] * 40, "the king " * 2000, [9] * 5]
    outputs = llm.generate(rows, PARAMS[1], on_error="return", use_tqdm=found.append)
    last = found[-1]
    assert (last.rows, last.done, last.failed, last.running, last.waiting) == (4, 4, 1, 0, 0)
    assert last.stopped_by_length == 3 and last.finished and not any(item.finished for item in found[:-1])
    assert last.prompt_tokens == 85 and last.generated_tokens == 24 and last.tokens == last.expected_tokens == 109
    assert last.cached_tokens == sum(output.num_cached_tokens for output in outputs) > 0
    assert last.prefix_hit_share == last.cached_tokens / 85
    assert last.generated_tokens_per_second == 24 / last.seconds
    for item in found:
        assert item.done + item.running + item.waiting == item.rows
        assert (item.seconds_left is None) == (item.done - item.not_run == 0 and item.done < item.rows)
    assert "4/4 rows done in " in last.summary() and "1 failed, 3 stopped by length, prefix hits" in last.summary()


def test_a_row_that_fails_while_it_runs_is_a_failed_row(llm: LLM) -> None:
    def fails(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("my table")

    found: list[GenerationProgress] = []
    params = [PARAMS[0], SamplingParams(logits_processors=[fails]), PARAMS[2]]
    llm.generate([[7, 8]] * 3, params, use_tqdm=found.append)
    assert (found[-1].done, found[-1].failed, found[-1].stopped_by_length) == (3, 1, 2)


def test_what_no_callable_takes_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=lambda: None)
    assert len(run(llm, PROMPTS)) == 3  # the engine goes on


def test_a_preempted_row_does_not_move_it_back() -> None:
    block = 32768
    with open_llm(max_model_len=64, kv_cache_memory_bytes=5 * block, enable_prefix_caching=False) as tight:
        params = SamplingParams(temperature=0, max_tokens=44, ignore_eos=True)
        tight.generate([[5] * 10, [6] * 10], params, use_tqdm=Recorder)
        assert engine_of(tight).scheduler.num_preemptions > 0
    assert [count for count, _, _ in Recorder.made[0].history][-1] == 2
    assert "rows 2/2 done, 0 running, 108 tokens" in Recorder.made[0].postfix


def test_false_makes_no_bar_and_no_prompts_make_none(llm: LLM) -> None:
    run(llm, PROMPTS)
    llm.generate([], use_tqdm=Recorder)
    assert Recorder.made == []


def test_a_partial_of_tqdm(llm: LLM) -> None:
    screen = io.StringIO()
    llm.generate(PROMPTS, GREEDY, use_tqdm=partial(tqdm, file=screen, ascii=True, mininterval=0, ncols=200))
    shown = screen.getvalue()
    assert "Generating: 100%" in shown
    assert "rows 3/3 done, 0 running" in shown


def test_the_default_bar_leaves_one_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Generating: 100%" in err
    shown = err.rpartition("\r")[2]
    assert shown.startswith("3/3 rows done in ") and "tokens/s" in shown and shown.count("\n") == 1


def test_a_short_call_shows_nothing(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 60.0)
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")


class Cell:
    """Stands for the output of a notebook's cell: what a saved notebook would have."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.updates = 0

    def show(self, data: dict[str, str]) -> Cell:
        self.outputs.append(data["text/plain"])
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.updates += 1
        self.outputs[-1] = data["text/plain"]


def test_a_saved_notebook_has_the_last_line_alone(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell()
    monkeypatch.setattr(bar_module, "_notebook_display", lambda: cell.show)
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")
    assert len(cell.outputs) == 1 and cell.updates > 1
    assert cell.outputs[0].startswith("3/3 rows done in ")


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
    found: list[GenerationProgress] = []
    bar = Progress(found.append, 1)
    for _ in range(10_000):
        bar.update()
    # To show it takes one tick of this clock, so 1000 ticks must pass before the next; asking is a tick, too.
    assert 8 <= len(found) <= 10
    bar.update(force=True)
    assert len(found) <= 11


def test_rows_that_wait_are_not_looked_at(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at grows with the rows that run, two here, and not with the rows of the call."""
    looked = 0

    def counting(state: Any) -> list[Any]:
        nonlocal looked
        looked += 1
        return [completion.request for completion in state.completions]

    monkeypatch.setattr(progress, "_requests", counting)
    found: list[GenerationProgress] = []
    llm.generate([[5, 6]] * 60, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=found.append)
    assert len(found) > 60
    assert looked < 14 * len(found)


def test_a_job_shows_its_rows(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*PROMPTS * 3, "x" * 20_000]))
    found: list[GenerationProgress] = []
    llm.run(source, tmp_path / "out.jsonl", SamplingParams(max_tokens=4), use_tqdm=found.append)
    assert [found[-1].done, found[-1].rows, found[-1].failed] == [10, 10, 1]
    assert found[0].waiting > 0 and found[-1].finished


@pytest.mark.parametrize("every", [4, 1 << 20])
def test_rows_that_have_ended_are_forgotten_between_refreshes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "And"}\n' * 40)
    held, add = [0], Progress.add

    def watched(self: Progress, state: Any) -> None:
        add(self, state)
        held.append(len(self._waiting) + len(self._active))

    monkeypatch.setattr(Progress, "add", watched)
    monkeypatch.setattr(Progress, "update", lambda self, force=False: None)  # the next refresh is far away
    monkeypatch.setattr("llm.engine.progress._COUNTED_EVERY", every)
    with open_llm(max_model_len=64, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=1, temperature=0)
        llm.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", params, use_tqdm=lambda progress: None)
    assert max(held) == 40 if every > 40 else max(held) <= 12
