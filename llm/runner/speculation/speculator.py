"""The proposer of this library: asks its sources what they can draft, drafts what pays, and follows what became of
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llm.config.engine import SpeculativeConfig
from llm.engine.boundary import Runner, RunnerPlan
from llm.engine.scheduler import scheduler_maker
from llm.engine.step import SchedulerOutput
from llm.runner.batch import InputBatch
from llm.runner.speculation.draft_model import DraftModelSource
from llm.runner.speculation.lookup import ForcedSource, NgramSource
from llm.runner.speculation.pace import MOST_ROWS, Chances, Choice, StepTimes, choose
from llm.runner.speculation.proposer import ComputedStep, Offer, Proposer, Source

# After so many steps without drafts, sources are asked at every fourth only, and nothing else is done if none of them
# has an offer: a step of a small model is soon over.
_PATIENCE, _SELDOM = 8, 4
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


def _room(batch: InputBatch, row: int) -> int:
    """How many tokens the row may still get."""
    room = batch.token_ids.shape[1] - int(batch.num_tokens[row])
    most = batch.params[row].max_tokens
    return room if most is None else min(room, most - len(batch.output_token_ids[row]))


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
