"""How many tokens to draft for each row, from the times of past steps and the drafts accepted so far.

The time of a step by its number of logit rows, and the chance that a row accepts a draft of a kind, are measured while
the engine works. They decide only how fast an answer comes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# With more rows a step's arithmetic takes as long as reading the weights, on every processor: drafts cannot pay.
MOST_ROWS = 32
_SAMPLES = 9
_ENOUGH = 3  # of one size, to go by
_WARM_UP = 2  # a step is recorded when its like has come before; both are slower than those that follow
_STALE = 1000  # steps after which a time may be of another load, and is measured anew
_LARGE_STEP = 32  # tokens of a step that show what a logit row costs where arithmetic binds
_MEMORY = 0.9  # what a verification keeps of the weight of those before it
_FADE = 0.98  # what a step without a verification keeps of a row's past
_LEAST_CHANCE = 0.1  # of a row that has not shown its own


@dataclass
class _Times:
    """The times of steps of one size: the last ones after the warm-up."""

    last_step: int
    warm_up: int = _WARM_UP
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))


class StepTimes:
    """The time of a step by its number of logit rows, one for each token.

    The least of the last ones counts: in the others another program may have taken the cores.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Times] = {}
        self._least: dict[int, float] = {}
        self._measured: list[int] = []  # the keys of `_least`, sorted
        self._steps = 0
        self._per_logit_row: deque[float] = deque(maxlen=_SAMPLES)
        self._is_warm = False  # the first large step touches weights and memory for the first time

    def add(self, tokens: int, logit_rows: int, seconds: float) -> None:
        """A step has been measured; with more `tokens` than `logit_rows` it computed prompts too."""
        self._steps += 1
        if tokens >= _LARGE_STEP:
            if self._is_warm:
                self._per_logit_row.append(seconds / tokens)
            self._is_warm = True
        if tokens != logit_rows:
            return
        times = self._of.get(logit_rows)
        if times is None or self._steps - times.last_step > _STALE:
            times = self._of[logit_rows] = _Times(self._steps)
        times.last_step = self._steps
        if times.warm_up:
            times.warm_up -= 1
            return
        times.last.append(seconds)
        if len(times.last) < _ENOUGH:
            return
        if logit_rows not in self._least:
            insort(self._measured, logit_rows)
        self._least[logit_rows] = min(times.last)

    def seconds(self, logit_rows: int) -> float | None:
        """Measured, or from the nearest numbers of logit rows that were; None: no smaller step was measured.

        Beyond the largest one measured, a logit row costs what a token of a prompt does: where reading the weights
        binds, it costs less, and the first such steps will show it.
        """
        known = self._least
        if logit_rows in known:
            return known[logit_rows]
        place = bisect_left(self._measured, logit_rows)
        if place == 0:
            return None
        below = self._measured[place - 1]
        if place == len(self._measured):
            per_logit_row = min(self._per_logit_row, default=known[below] / max(below, _LARGE_STEP))
            return known[below] + (logit_rows - below) * per_logit_row
        above = self._measured[place]
        return known[below] + (logit_rows - below) / (above - below) * (known[above] - known[below])


@dataclass
class _Count:
    accepted: float = 0.0
    tried: float = 0.0

    def fade(self, factor: float) -> None:
        self.accepted *= factor
        self.tried *= factor

    def chance(self, prior: float) -> float:
        """With the weight of two tries for the `prior`."""
        return (self.accepted + 2.0 * prior) / (self.tried + 2.0)


class Chances:
    """The chance that the next draft is accepted, by request and kind."""

    def __init__(self) -> None:
        self._of_kind: dict[str, _Count] = {}
        self._of_row: dict[str, dict[str, _Count]] = {}

    def of(self, request_id: str, kind: str) -> float:
        prior = max(_LEAST_CHANCE, self._of_kind.get(kind, _Count()).chance(0.5))
        return self._of_row.get(request_id, {}).get(kind, _Count()).chance(prior)

    def add(self, request_id: str, kind: str, drafted: int, accepted: int) -> None:
        own = self._of_row.setdefault(request_id, {}).setdefault(kind, _Count())
        for count in (own, self._of_kind.setdefault(kind, _Count())):
            count.fade(_MEMORY)
            count.accepted += accepted
            count.tried += min(accepted + 1, drafted)

    def fade(self, request_id: str) -> None:
        """A step has passed without drafts: what was true of the text before may change."""
        for count in self._of_row.get(request_id, {}).values():
            count.fade(_FADE)

    def forget(self, request_id: str) -> None:
        self._of_row.pop(request_id, None)

    def reset(self) -> None:
        self._of_row.clear()


@dataclass(frozen=True)
class Choice:
    """What a row may draft: at most `most` tokens, each accepted with this `chance` if those before it were."""

    most: int
    chance: float
    seconds_per_draft: float = 0.0


def levels(most: int) -> list[int]:
    """The numbers of drafts that are considered, increasing: few, so that steps of equal sizes are recorded."""
    found = [count for count in (1, 3, 7, 15, 31) if count < most]
    return [*found, most] if most else []


def choose(rows: int, choices: Mapping[int, Choice], times: StepTimes) -> dict[int, int]:
    """Row -> number of drafts, so that a step gives the most tokens per second; rows that draft none are absent.

    Args:
        rows: number of rows that decode, each of which gives a token without drafts.
        choices: of those that could draft.

    Drafts are added in the order of what they give per logit row, as long as they pay.
    """
    without = times.seconds(rows)
    if without is None:
        return {}
    steps = sorted(_steps(choices), reverse=True)
    best, best_rate = {}, rows / without
    chosen: dict[int, int] = {}
    tokens, logit_rows, drafting = float(rows), rows, 0.0
    for _, row, count, more_logit_rows, more_tokens in steps:
        chosen[row] = count
        tokens += more_tokens
        logit_rows += more_logit_rows
        drafting += more_logit_rows * choices[row].seconds_per_draft
        rate = tokens / ((times.seconds(logit_rows) or without) + drafting)
        if rate > best_rate:
            best, best_rate = dict(chosen), rate
    return best


def _steps(choices: Mapping[int, Choice]) -> Sequence[tuple[float, int, int, int, float]]:
    """(tokens per logit row, row, drafts, logit rows more than the level below, tokens more) of each level of each
    row."""
    found = []
    for row, choice in choices.items():
        before, reached = 0, 1.0
        for count in levels(choice.most):
            more = 0.0
            for _ in range(count - before):
                reached *= choice.chance
                more += reached
            found.append((more / (count - before), row, count, count - before, more))
            before = count
    return found
