"""The proposer of this library: asks its sources what they can draft, drafts what pays, and follows what became of it.

How many tokens pay follows from the time of a step by its number of logit rows, and from the chance that a row accepts
a draft of a kind. Both are measured while the engine works, and decide only how fast an answer comes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llm.config.engine import SpeculativeConfig
from llm.engine.boundary import Runner, RunnerPlan
from llm.engine.scheduler import scheduler_maker
from llm.engine.step import SchedulerOutput
from llm.runner.batch import InputBatch
from llm.runner.speculation.draft_model import DraftModelSource
from llm.runner.speculation.lookup import ForcedSource, NgramSource
from llm.runner.speculation.proposer import ComputedStep, Offer, Proposer, Source

# After so many steps without drafts, sources are asked at every fourth only, and nothing else is done if none of them
# has an offer: a step of a small model is soon over.
_PATIENCE, _SELDOM = 8, 4
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


@dataclass(frozen=True)
class Choice:
    """What a row may draft: at most `most` tokens, each accepted with this `chance` if those before it were."""

    most: int
    chance: float
    seconds_per_draft: float = 0.0


_BEST_CASE = {0: Choice(most=7, chance=0.95)}


class Speculator(Proposer):
    """Args:
    sources: the first that has an offer for a row drafts for it.
    most: most drafts of a row.
    """

    def __init__(self, sources: Sequence[Source], most: int) -> None:
        self._sources = sources
        self._following = [source for source in sources if source.follows]
        self._most = most
        self._times = StepTimes()
        self._chances = Chances()
        self._kinds: dict[str, str] = {}  # request id -> kind of its drafts
        self._vain = 0  # steps since the last one with drafts

    def update(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed:
            self._kinds.pop(request_id, None)
            self._chances.forget(request_id)
            for source in self._sources:
                source.forget(request_id)

    def looks(self, batch: InputBatch) -> bool:
        self._vain += 1
        if self._following or self._vain <= _PATIENCE:
            return True
        return self._vain % _SELDOM == 0 and self._may_draft(batch)

    def propose(self, step: ComputedStep) -> Mapping[str, Sequence[int]]:
        self._learn(step)
        for source in self._following:
            source.observe(step)
        batch, rows = step.batch, step.rows.tolist()
        if not rows or len(rows) > MOST_ROWS or (len(rows) > 1 and not self._counts(len(rows), _BEST_CASE)):
            return {}
        offers = {row: found for row in rows if (found := self._offer(batch, row)) is not None}
        if not offers:
            return {}
        choices = {
            row: Choice(offer.most, self._chances.of(batch.request_ids[row], offer.kind), source.seconds_per_draft)
            for row, (source, offer) in offers.items()
        }
        counts = self._counts(len(rows), choices)
        drafts: dict[str, Sequence[int]] = {}
        for source in self._sources:
            own = {row: count for row, count in counts.items() if offers[row][0] is source}
            if own:
                drafts |= {batch.request_ids[row]: tokens for row, tokens in source.draft(batch, own).items()}
        if counts:
            self._vain = 0
        for row in counts:
            self._kinds[batch.request_ids[row]] = offers[row][1].kind
        return drafts

    def reset(self) -> None:
        self._kinds.clear()
        self._chances.reset()
        for source in self._sources:
            source.reset()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _may_draft(self, batch: InputBatch) -> bool:
        """False if no row would get drafts; True too where the times of steps with so many rows are unknown."""
        rows = len(batch.request_ids)
        if rows > 1:
            if rows > MOST_ROWS or self._times.seconds(rows) is None:
                return rows <= MOST_ROWS
            if not self._counts(rows, _BEST_CASE):
                return False
        return any(self._offer(batch, row) is not None for row in range(rows))

    def _counts(self, rows: int, choices: Mapping[int, Choice]) -> dict[int, int]:
        return choose(rows, choices, self._times)

    def _offer(self, batch: InputBatch, row: int) -> tuple[Source, Offer] | None:
        most = min(self._most, _room(batch, row) - 1)
        if most < 1:
            return None
        for source in self._sources:
            if (offer := source.offer(batch, row, most)) is not None:
                return source, offer
        return None

    def _learn(self, step: ComputedStep) -> None:
        rows, num_drafts = step.rows.tolist(), step.num_drafts.tolist()
        self._times.add(len(step.hidden), len(rows) + sum(num_drafts), step.seconds)
        for row, drafted, sampled in zip(rows, num_drafts, step.num_sampled.tolist(), strict=True):
            request_id = step.batch.request_ids[row]
            if drafted:
                self._chances.add(request_id, self._kinds[request_id], drafted, sampled - 1)
            else:
                self._chances.fade(request_id)


def make_proposer(
    config: SpeculativeConfig | None,
    plan: RunnerPlan,
    make_runner: Callable[[], Runner],
    make_head: Callable[[SpeculativeConfig], Source],
) -> Proposer | None:
    """Args:
    plan: the target model's; its `draft` is the draft model's.
    make_runner: makes a runner for the draft model.
    make_head: makes the source of a head that reads the target's hidden states.
    """
    if config is None:
        return None
    source: Source = NgramSource(config.prompt_lookup_min)
    if config.has_head:
        source = make_head(config)
    elif plan.draft is not None:
        runner = make_runner()
        runner.load(plan.draft)
        longest = plan.draft.config.model_config.max_model_len
        source = DraftModelSource(runner, scheduler_maker(plan.draft), longest, plan.config.model_config.vocab_size)
    return Speculator((ForcedSource(), source), config.num_speculative_tokens)


def _room(batch: InputBatch, row: int) -> int:
    """How many tokens the row may still get."""
    room = batch.token_ids.shape[1] - int(batch.num_tokens[row])
    most = batch.params[row].max_tokens
    return room if most is None else min(room, most - len(batch.output_token_ids[row]))


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


def levels(most: int) -> list[int]:
    """The numbers of drafts that are considered, increasing: few, so that steps of equal sizes are recorded."""
    found = [count for count in (1, 3, 7, 15, 31) if count < most]
    return [*found, most] if most else []


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
class _Times:
    """The times of steps of one size: the last ones after the warm-up."""

    last_step: int
    warm_up: int = _WARM_UP
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))


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
