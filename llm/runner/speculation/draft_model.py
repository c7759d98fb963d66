"""Drafts from a smaller model with the same tokenizer.

That model has a runner and a scheduler of its own. To draft for a row is to generate a few tokens of it: the tokens
that the two models share are in the smaller one's prefix cache, wrong drafts are never found there, and the least
recently used blocks are freed. It draws with the row's own parameters, seed and positions, so that at any temperature
similar distributions give the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from llm.engine.boundary import Runner
from llm.engine.request import Request
from llm.engine.scheduler import Scheduler
from llm.runner.batch import InputBatch
from llm.runner.speculation.proposer import Offer, Source
from llm.sampling_params import SamplingParams

_FADE = 0.9  # what a draft's time keeps of those before


class DraftModelSource(Source):
    """Args:
    runner: has loaded the draft model.
    make_scheduler: returns a scheduler of its cache with all blocks free.
    longest: most tokens of a sequence of the draft model.
    vocab_size: of the model it drafts for; larger token ids end a draft.
    """

    def __init__(self, runner: Runner, make_scheduler: Callable[[], Scheduler], longest: int, vocab_size: int) -> None:
        self._runner = runner
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._longest = longest
        self._vocab_size = vocab_size

    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        most = min(most, self._longest - int(batch.num_tokens[row]))
        return Offer(most, "of the draft model") if most > 0 else None

    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        started = perf_counter()
        requests = {row: _request(batch, row, count) for row, count in counts.items()}
        try:
            self._generate(list(requests.values()))
        except BaseException:
            self.reset()
            raise
        drafts = {
            row: self._known(request.token_ids[int(batch.num_tokens[row]) :]) for row, request in requests.items()
        }
        seconds = (perf_counter() - started) / sum(counts.values())
        before = self.seconds_per_draft or seconds
        self.seconds_per_draft = _FADE * before + (1.0 - _FADE) * seconds
        return drafts

    def reset(self) -> None:
        self._scheduler = self._make_scheduler()
        self._runner.reset()

    def close(self) -> None:
        self._runner.close()

    def _generate(self, requests: Sequence[Request]) -> None:
        """Sample until every request has ended: with its last token, or without one for an error."""
        scheduler, running = self._scheduler, {request.request_id: request for request in requests}
        for request in requests:
            scheduler.add(request)
        while running:
            plan = scheduler.schedule()
            result = self._runner.execute(plan)
            scheduler.update_from_output(plan, result)
            ended = [running[name].append(token) for name, (token,) in result.sampled_token_ids.items()]
            for name, error in result.errors.items():
                running[name].fail(error)
            if any(ended) or result.errors:
                for request in [request for request in running.values() if request.finish_reason is not None]:
                    scheduler.finish(running.pop(request.request_id))
                scheduler.remove_finished()

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        unknown = next((index for index, token in enumerate(tokens) if token >= self._vocab_size), len(tokens))
        return tokens[:unknown]


def _request(batch: InputBatch, row: int, count: int) -> Request:
    """A request that goes on with the row for `count` tokens, with the draws that the row would make."""
    request = Request(
        batch.request_ids[row],
        batch.prompt_token_ids[row],
        _params(batch.params[row]),
        seed=int(batch.sampling.seed[row]),
        sample_index=int(batch.sampling.sample_index[row]),
        max_total_tokens=int(batch.num_tokens[row]) + count,
        eos_token_ids=frozenset(),
        cache_key=b"",
    )
    request.token_ids += batch.output_token_ids[row]
    return request


def _params(params: SamplingParams) -> SamplingParams:
    """What the choice of a token depends on, without what costs more than a wrong draft."""
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=None,
    )
