"""From a runner's plan to the proposer it asks for."""

from __future__ import annotations

from collections.abc import Callable

from llm.config.speculative import SpeculativeConfig
from llm.engine.boundary import RunnerPlan
from llm.engine.proposer import Proposer
from llm.engine.runner import Runner
from llm.engine.scheduler import scheduler_maker
from llm.engine.speculation.draft_model import DraftModelSource
from llm.engine.speculation.forced import ForcedSource
from llm.engine.speculation.ngram import NgramSource
from llm.engine.speculation.source import Source
from llm.engine.speculation.speculator import Speculator


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
