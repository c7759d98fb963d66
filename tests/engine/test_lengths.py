"""The estimate of the tokens to come: exact where nothing is unknown, and its bounds hold where something is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from llm.engine.lengths import Lengths

ROWS, AT_ONCE, MOST = 600, 32, 1500


def simulated(lengths: np.ndarray) -> list[tuple[float, float, float, float]]:
    """(share done, true, low, high) tokens to come at times of a run of rows with these lengths."""
    waiting, found = list(lengths), Lengths()
    running: list[list[int]] = []
    points, step = [], 0
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append([0, int(waiting.pop(0))])
        for row in running:
            row[0] += 1
        for done, length in running:
            if done == length:
                found.add(length, by_itself=length < MOST)
        running = [row for row in running if row[0] < row[1]]
        step += 1
        if step % 40 == 0 and running:
            left = Counter({MOST: len(waiting)})
            low, _, high = found.to_come([(done, MOST) for done, _ in running], left)
            true = sum(length - done for done, length in running) + sum(waiting)
            points.append((1 - true / lengths.sum(), true, low.all, high.all))
    return points


DRAWS = {
    "geometric": lambda random: random.geometric(1 / 150, ROWS),
    "uniform": lambda random: random.integers(20, 300, ROWS),
    "lognormal": lambda random: random.lognormal(4.5, 0.7, ROWS).astype(int) + 1,
    "two kinds": lambda random: np.where(random.random(ROWS) < 0.7, 15, random.integers(200, 260, ROWS)),
    "cut": lambda random: np.where(random.random(ROWS) < 0.05, MOST, random.geometric(1 / 60, ROWS)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_bounds_hold_and_are_not_idle(name: str) -> None:
    points = simulated(np.minimum(DRAWS[name](np.random.default_rng(3)), MOST))
    held = [low * 0.999 <= true <= high * 1.001 for _, true, low, high in points]
    assert sum(held) >= 0.85 * len(held)
    late = [high / max(1.0, low) for share, _, low, high in points if 0.3 < share < 0.8]
    assert np.median(late) < 4.0


def test_the_mean_of_the_rows_that_have_ended_is_too_low() -> None:
    """Negative control: what the estimate would be if rows that run were like those that have ended."""
    lengths = np.random.default_rng(3).geometric(1 / 150, ROWS)
    found, low = Lengths(), 0
    running = [(40, MOST)] * int((lengths[:AT_ONCE] > 40).sum())
    ended = [int(length) for length in lengths[:AT_ONCE] if length <= 40]
    for length in ended:
        found.add(length, by_itself=True)
    likely = found.to_come(running, Counter({MOST: ROWS - AT_ONCE}))[1].all
    low = (ROWS - AT_ONCE) * float(np.mean(ended))
    true = lengths[AT_ONCE:].sum()
    assert low < 0.25 * true < 0.5 * likely < 1.5 * true


def test_rows_that_always_reach_their_most_are_exact() -> None:
    found = Lengths()
    for _ in range(5):
        found.add(16, by_itself=False)
    for bound in found.to_come([(10, 16), (3, 16)], Counter({16: 100}))[1:]:
        assert bound.all == pytest.approx(6 + 13 + 1600)
        assert bound.longest == 16
    longer = found.to_come([], Counter({48: 1}))[1]
    assert longer.all == 48  # none has ended by itself, so more room is more tokens


def test_nothing_known_is_the_most() -> None:
    low, likely, high = Lengths().to_come([], Counter({10: 2, 20: 1}), typical_most=10, unseen=3)
    assert likely.all == high.all == 70
    assert low.all == 6  # a token each


def test_one_length_is_learned() -> None:
    found = Lengths()
    for _ in range(50):
        found.add(8, by_itself=True)
    low, likely, high = found.to_come([(3, 500)], Counter({500: 10}))
    assert low.all == pytest.approx(likely.all) == pytest.approx(high.all) == pytest.approx(85)
