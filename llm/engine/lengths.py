"""How many tokens are still to come: an estimate from the requests that have ended, and from how long others run.

Owns the estimate. Short answers end first, so their mean is too low; requests that still run are counted as longer
than they are now (the estimator of Kaplan and Meier, Nonparametric Estimation from Incomplete Observations, 1958).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# How far the bounds lie from the estimate, in standard errors.
_ERRORS = 2.0
# For the upper bound: beyond the longest request so far, requests end at this share of the rate that is likely.
_LEAST_RATE = 0.05


@dataclass(frozen=True)
class ToCome:
    """Tokens to come: of all requests together, and of the one that is expected to be the longest."""

    all: float
    longest: float


class Lengths:
    """Generated tokens of the requests that have ended."""

    def __init__(self) -> None:
        self._by_itself: Counter[int] = Counter()
        self._cut: Counter[int] = Counter()

    def add(self, tokens: int, by_itself: bool) -> None:
        """A request that has ended; `by_itself`: not at its most tokens."""
        (self._by_itself if by_itself else self._cut)[tokens] += 1

    def to_come(
        self, running: Sequence[tuple[int, int]], waiting: Counter[int], typical_most: int = 0, unseen: int = 0
    ) -> tuple[ToCome, ToCome, ToCome]:
        """(least, likely, most).

        Args:
            running: (generated so far, most) of each request that runs.
            waiting: how many requests wait, by their most tokens.
            typical_most: the most tokens of the `unseen` requests, of which nothing is known.
        """
        known, hazard, rate = self._hazard(Counter(tokens for tokens, _ in running))
        error = _ERRORS * np.sqrt((1.0 - hazard) / max(1, known))
        asked = np.array(running, dtype=np.int64).reshape(-1, 2), +(waiting + Counter({typical_most: unseen}))
        likely, spread = _expected(hazard, rate, *asked)
        low, _ = _expected(hazard * (1.0 + error), 1.0, *asked)
        high, _ = _expected(hazard * (1.0 - error), rate * _LEAST_RATE, *asked)
        least, most = len(running) + asked[1].total(), asked[0][:, 1].sum() - asked[0][:, 0].sum()
        most = float(most) + sum(tokens * count for tokens, count in asked[1].items())
        low_all = max(float(least), low.all - _ERRORS * spread)
        return ToCome(low_all, low.longest), likely, ToCome(min(most, high.all + _ERRORS * spread), high.longest)

    def _hazard(self, running: Counter[int]) -> tuple[int, np.ndarray, float]:
        """(how many have ended by themselves, their share at 1, 2, ... tokens of all that got there, and beyond)."""
        longest = max([0, *self._by_itself, *self._cut, *running])
        ended, risk = _table(self._by_itself, longest), _table(self._cut, longest) + _table(running, longest)
        risk = np.cumsum((risk + ended)[::-1])[::-1]
        known, last = self._by_itself.total(), max([0, *self._by_itself])
        # Beyond the longest that ended by itself, none has in so many tokens.
        rate = min(known / max(1.0, float(risk[1:].sum())), 1.0 / max(1.0, float(risk[last + 1 :].sum())))
        return known, ended[1:] / np.maximum(risk[1:], 1.0), rate


def _expected(hazard: np.ndarray, tail: float, running: np.ndarray, waiting: Counter[int]) -> tuple[ToCome, float]:
    """(expectation, its standard deviation), if requests end at t + 1 tokens with probability `hazard[t]`.

    Args:
        tail: the probability beyond `hazard`.
    """
    most = max([0, *running[:, 1], *waiting])
    hazards = np.full(most, tail)
    hazards[: len(hazard)] = np.clip(hazard, 0.0, 1.0)[:most]
    longer = np.concatenate([[1.0], np.cumprod(1.0 - hazards)])[:-1]  # than t tokens
    sums = np.concatenate([[0.0], np.cumsum(longer)])
    squares = np.concatenate([[0.0], np.cumsum(longer * np.arange(1, 2 * most, 2))])
    at, end = running[:, 0], running[:, 1]
    there = np.maximum(longer[np.minimum(at, max(0, most - 1))] if most else 1.0, 1e-9)
    left = (sums[end] - sums[at]) / there
    left_square = (squares[end] - squares[at]) / there - 2 * at * left
    left = np.clip(left, np.minimum(1, end - at), end - at)
    whole = np.fromiter(waiting.keys(), dtype=np.int64, count=len(waiting))
    counts = np.fromiter(waiting.values(), dtype=np.int64, count=len(waiting))
    variance = (
        np.maximum(0.0, left_square - left**2).sum() + np.maximum(0.0, squares[whole] - sums[whole] ** 2) @ counts
    )
    longest = max(float(left.max(initial=0.0)), float(sums[whole].max(initial=0.0)))
    return ToCome(float(left.sum() + sums[whole] @ counts), longest), float(variance) ** 0.5


def _table(counts: Counter[int], longest: int) -> np.ndarray:
    """How often each number from 0 to `longest` was counted."""
    table = np.zeros(longest + 1)
    for value, count in counts.items():
        table[value] = count
    return table
