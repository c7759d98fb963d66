"""The persistent batch tells processors the truth: its `BatchUpdate`s, replayed, give the rows it really has.

Here is the model of the batch that the documentation of the interface describes, and its negative controls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.engine.step import NewRow, SchedulerOutput
from llm.runner.batch import InputBatch
from llm.sampling.logits_processors import BatchUpdate, MoveDirectionality
from llm.sampling_params import SamplingParams

ROWS = 6


class Replay:
    """What a processor knows of the batch: a list of places, each empty or (params, prompt ids, live output ids)."""

    def __init__(self) -> None:
        self.places: list[Any] = [None] * ROWS
        self.size = 0
        self.kinds: set[str] = set()

    def apply(self, update: BatchUpdate | None) -> None:
        """In the order removed, added, moved; the documented shape of an update is checked on the way."""
        if update is None:
            return
        for row in update.removed:
            assert self.places[row] is not None
            self.places[row] = None
            self.kinds.add("remove")
        rows = [added[0] for added in update.added]
        assert rows == sorted(rows)
        for row, *state in update.added:
            self.kinds.add("extend" if row >= self.size else "replace")
            self.places[row] = state
        replaced = [row for row in rows if row < self.size]
        assert not update.removed or len(replaced) == len(rows), "the batch was extended while a place was empty"
        assert not (update.removed and replaced) or min(update.removed) > max(replaced)
        self._move(update)
        self.size = update.batch_size
        assert all(self.places[: self.size]) and not any(self.places[self.size :]), "the rows are not packed"

    def _move(self, update: BatchUpdate) -> None:
        sources, targets = [move[0] for move in update.moved], [move[1] for move in update.moved]
        assert targets == sorted(targets) and sources == sorted(sources, reverse=True)
        for source, target, direction in update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            assert self.places[target] is None and self.places[source] is not None
            self.places[target], self.places[source] = self.places[source], None
            self.kinds.add("move")


class Driver:
    """Requests come and go; after every step replay and batch must agree."""

    def __init__(self) -> None:
        self.batch = InputBatch(ROWS, 32, 1, 4)
        self.replay = Replay()
        self.alive: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    def step(self, leave: set[int], arrive: int) -> None:
        plan = SchedulerOutput(removed=[name for index, name in enumerate(self.alive) if index in leave])
        self.alive = [name for name in self.alive if name not in plan.removed]
        plan.new_rows = [self._new_row() for _ in range(min(arrive, ROWS - len(self.alive)))]
        self.alive += [new.request_id for new in plan.new_rows]
        update = self.batch.update(plan)
        assert (update is None) == (not plan.removed and not plan.new_rows)
        self.replay.apply(update)
        self._grow()
        self._check()

    def _new_row(self) -> NewRow:
        name, self.count = str(self.count), self.count + 1
        # A row that comes back after preemption has outputs already.
        outputs = [900 + self.count] * (self.count % 3)
        self.tokens[name] = list(outputs)
        return NewRow(name, [self.count, 7, *outputs], 2, 0, [[1]], 0, 0, SamplingParams(seed=self.count), 0, 0, 2)

    def _grow(self) -> None:
        """Every other row draws a token."""
        rows = np.arange(0, len(self.batch.request_ids), 2)
        drawn = [int(row) + 500 for row in rows]
        self.batch.append(rows, drawn)
        for row, token in zip(rows.tolist(), drawn, strict=True):
            self.tokens[self.batch.request_ids[row]].append(token)

    def _check(self) -> None:
        batch = self.batch
        assert sorted(batch.request_ids) == sorted(self.alive)
        assert self.replay.size == len(batch.request_ids)
        for row, name in enumerate(batch.request_ids):
            params, prompt, output = self.replay.places[row]
            assert batch.index[name] == row
            assert (params.seed, prompt) == (int(name) + 1, [int(name) + 1, 7])
            assert output == self.tokens[name] == batch.token_ids[row, 2 : batch.num_tokens[row]].tolist()
        assert [list(row[1:]) for row in batch.added_rows()] == self.replay.places[: len(self.alive)]


STEPS = st.lists(st.tuples(st.sets(st.integers(0, ROWS - 1)), st.integers(0, ROWS)), min_size=1, max_size=12)


@given(steps=STEPS)
@settings(max_examples=150)
def test_updates_replay_to_the_rows_of_the_batch(steps: list[tuple[set[int], int]]) -> None:
    driver = Driver()
    for leave, arrive in steps:
        driver.step(leave, arrive)


def every_kind() -> Driver:
    driver = Driver()
    for leave, arrive in [(set[int](), 6), ({0, 2, 3}, 1), ({1}, 2), (set(), 0), ({0, 1}, 0), (set(), 3)]:
        driver.step(leave, arrive)
    return driver


def test_every_kind_of_change_is_seen() -> None:
    assert every_kind().replay.kinds == {"remove", "extend", "replace", "move"}


def stale_copy_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    append = InputBatch.append

    def planted(self: InputBatch, *args: Any) -> None:
        self.output_token_ids = [list(tokens) for tokens in self.output_token_ids]
        append(self, *args)

    monkeypatch.setattr(InputBatch, "append", planted)


def move_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    update = InputBatch.update

    def planted(self: InputBatch, plan: SchedulerOutput) -> Any:
        told = update(self, plan)
        return told and BatchUpdate(told.batch_size, told.removed, told.added, [])

    monkeypatch.setattr(InputBatch, "update", planted)


def newest_place_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.runner.batch.BatchUpdateBuilder.pop_removed", lambda self: None)


@pytest.mark.parametrize("plant", [stale_copy_of_the_output, move_untold, newest_place_first])
def test_planted_defects_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        every_kind()
