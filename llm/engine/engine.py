"""The loop: schedule, execute, append, check, finish.

The engine has the requests in flight and nothing of what a runner has (`boundary.py`). It runs in the caller's thread;
between calls nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter, time

import torch

from llm.config.engine import EngineConfig
from llm.engine.boundary import Runner
from llm.engine.output import Completion, PromptState
from llm.engine.request import Request
from llm.engine.rows import Row
from llm.engine.scheduler import Scheduler
from llm.engine.stats import EndedRequests, EngineStats, Gauges, LLMStats, share_in_use, warn_of_busy_cores
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.errors import LogitsProcessorError
from llm.outputs import RequestStateStats
from llm.platforms.limits import explain_memory_errors
from llm.text.tokenizer import Tokenizer


class Engine:
    """The requests of one `LLM`.

    Args:
        make_scheduler: returns a scheduler with all blocks free; called at the start and after a failure.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_scheduler: Callable[[], Scheduler],
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.scheduler = make_scheduler()
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.stats = EngineStats()
        self._make_scheduler = make_scheduler
        self.ended = EndedRequests()
        self._completions: dict[str, Completion] = {}
        self._watched: dict[str, tuple[PromptState, list[PromptState]]] = {}
        self._added = 0
        self.needs_reset = False  # a `reset` has failed: another is to come before anything else

    def add(self, row: Row, *, streaming: bool = False, ended: list[PromptState] | None = None) -> PromptState:
        """Queue a row's `n` completions; the first computes the prompt, the others share it. Fails like `step`.

        Args:
            ended: gets the prompt when all of its completions have ended, unless by `abort`.
        """
        prompt_id = str(self._added)
        self._added += 1
        stops = frozenset(row.params.stop_token_ids or ())
        row.params.all_stop_token_ids = stops if row.params.ignore_eos else stops | self.eos_token_ids
        try:
            completions = [self._add_completion(prompt_id, index, row, streaming) for index in range(row.params.n)]
            state = PromptState(prompt_id, row, completions)
            if ended is not None:
                self._watched[prompt_id] = state, ended
            return state
        except BaseException:
            with explain_memory_errors("queue a request"):
                self.reset()
                raise

    def step(self) -> None:
        """Run one step. If it fails, every request is dropped and the engine stays usable."""
        started = perf_counter()
        try:
            plan = self.scheduler.schedule()
            self._note_scheduled(plan)
            result = self.runner.execute(plan)
            accepted = self.scheduler.update_from_output(plan, result)
            self._update(result)
        except BaseException:
            with explain_memory_errors("compute a step"):
                self.reset()
                raise
        self._count(plan, result, accepted, perf_counter() - started)

    def run(self, prompts: Sequence[PromptState], between_steps: Callable[[], None]) -> None:
        """Step until these prompts are finished; requests of suspended streams advance with them."""
        try:
            with warn_of_busy_cores(self.config.num_threads or torch.get_num_threads()):
                for completion in (completion for prompt in prompts for completion in prompt.completions):
                    while completion.request.finish_reason is None:
                        self.step()
                        between_steps()
        finally:
            self.end_call()

    @property
    def max_num_seqs(self) -> int:
        """How many requests are computed at a time."""
        return self.config.scheduler_config.max_num_seqs

    def gauges(self) -> Gauges:
        """What there is now."""
        scheduler = self.scheduler
        return Gauges(len(scheduler.running), len(scheduler.waiting), share_in_use(scheduler.blocks))

    def all_stats(self) -> LLMStats:
        """What there is to count, as it is now."""
        return LLMStats(
            **vars(self.stats),
            **vars(self.gauges()),
            **self.ended.totals(),
            weight_bytes=self.runner.cost().weight_bytes,
            kv_cache_bytes=self.config.cache_config.kv_cache_memory_bytes,
        )

    def needs_model_here(self, method: str) -> None:
        """Raise `ValidationError` if the model is not in this process, for a method that reads or changes it."""

    def reset_prefix_cache(self) -> None:
        """Forget the prefix cache; no request is in flight."""
        self.scheduler.blocks.reset_prefix_cache()

    def end_call(self) -> None:
        """Release what is held only during a call, such as threads."""
        self.runner.end_call()

    def abort(self, prompts: Sequence[PromptState]) -> None:
        """Drop the unfinished requests of these prompts and free their blocks."""
        for prompt in prompts:
            self._watched.pop(prompt.request_id, None)
        ids = [completion.request.request_id for prompt in prompts for completion in prompt.completions]
        self.scheduler.abort(ids)
        for request_id in ids:
            completion = self._completions.pop(request_id, None)
            if completion is not None:
                self.ended.add(completion.request)

    def reset(self) -> None:
        """Drop every request and the prefix cache, after any error.

        An interrupted step may leave the scheduler inconsistent, and cached blocks that were never computed. So the
        scheduler is replaced by a new one; if that fails, the next call begins with it.
        """
        self.needs_reset = True
        with explain_memory_errors("go on after an error"):
            self._abort_all()
            self.scheduler = self._make_scheduler()
            self.runner.reset()
        self.needs_reset = False

    def close(self) -> None:
        """Free everything large, even while something such as a traceback still refers to this engine."""
        self._abort_all()
        self.runner.close()
        del self.runner, self.scheduler, self.tokenizer

    def _abort_all(self) -> None:
        """Finish every request as aborted, even one that has its last token but whose text is not finished."""
        for completion in self._completions.values():
            completion.request.finish("abort")
            self.ended.add(completion.request)
        self._completions.clear()
        for state, ended in self._watched.values():
            ended.append(state)
        self._watched.clear()

    def _add_completion(self, prompt_id: str, index: int, row: Row, streaming: bool) -> Completion:
        limit = self.config.model_config.max_model_len
        if row.params.max_tokens is not None:
            room = 0 if row.pooling is not None else row.params.max_tokens
            limit = min(limit, len(row.token_ids) + room)
        request = Request(
            f"{prompt_id}-{index}",
            row.token_ids,
            row.params,
            seed=row.seed,
            sample_index=index,
            max_total_tokens=limit,
            eos_token_ids=self.eos_token_ids,
            cache_key=self._cache_key(prompt_id, row),
            pooling=row.pooling,
            adapter=row.adapter,
            priority=row.priority,
            images=row.images,
        )
        if row.params.prompt_logprobs is not None and index == 0:
            request.prompt_logprobs_from = row.score_from - 1
        request.metrics = RequestStateStats(arrival_time=time(), queued_ts=monotonic())
        completion = Completion(request, self.tokenizer, streaming, row.score_from)
        self._queue(completion, row.known_outputs[index] if row.known_outputs else ())
        return completion

    def _queue(self, completion: Completion, known: Sequence[int]) -> None:
        """Queue a completion that goes on after the tokens that are known of it."""
        request = completion.request
        for token in known:
            request.token_ids.append(token)  # as after a preemption, its keys and values are computed again
            completion.push(token)
        self._completions[request.request_id] = completion
        self.scheduler.add(request)

    def _note_scheduled(self, plan: SchedulerOutput) -> None:
        now = monotonic()
        for row in plan.new_rows:
            metrics = self._completions[row.request_id].request.metrics
            metrics.scheduled_ts = metrics.scheduled_ts or now

    def _cache_key(self, prompt_id: str, row: Row) -> bytes | None:
        """With prefix caching off, only completions of one prompt share blocks, and rows with equal `sharing`.

        Rows with different adapters never do: their keys and values differ. Nor do rows with interventions, with any.
        """
        if row.params.inside is not None and row.params.inside.changes:
            return None
        adapter = "" if row.adapter is None else f"adapter {row.adapter.digest} "
        if self.config.cache_config.enable_prefix_caching:
            return adapter.encode() if row.cache_salt is None else f"{adapter}salt {row.cache_salt}".encode()
        if row.sharing is not None:
            return f"{adapter}sharing {row.sharing}".encode()
        return f"prompt {prompt_id}".encode() if row.params.n > 1 else None

    def _update(self, result: RunnerOutput) -> None:
        """Append the sampled tokens and finish the requests that have ended."""
        any_finished, now = False, monotonic()
        for request_id, prompt_logprobs in result.prompt_logprobs.items():
            self._completions[request_id].add_prompt_logprobs(prompt_logprobs, result.prompt_scores.get(request_id, []))
        for request_id, parts in result.activations.items():
            self._completions[request_id].add_activations(parts)
        for request_id, tokens in result.sampled_token_ids.items():
            completion = self._completions[request_id]
            request = completion.request
            first = len(request.token_ids)
            for token in tokens:
                request.append(token)
                if completion.incremental:
                    completion.push(token)
                if request.finish_reason is not None:
                    # With drafts, a step may have sampled tokens after the one that ended the request: drop them.
                    count = len(request.token_ids) - first
                    del tokens[count:], result.logprobs.get(request_id, [])[count:]
                    any_finished = True
                    break
            request.metrics.add_tokens(len(request.token_ids) - first, now)
            if request_id in result.logprobs:
                completion.add_logprobs(result.logprobs[request_id])
            if request.finish_reason is not None:
                self._finish(completion)
        for request_id, pooled in result.pooled.items():
            completion, any_finished = self._completions[request_id], True
            completion.request.pooled = pooled
            completion.request.finish("stop")
            self._finish(completion)
        for request_id, error in result.errors.items():
            if request_id not in self._completions:
                continue  # it ended with an earlier token of the step
            if isinstance(error, LogitsProcessorError):
                raise error
            any_finished = True
            self._completions[request_id].request.fail(error)
            self._finish(self._completions[request_id])
        if any_finished:
            self.scheduler.remove_finished()

    def _finish(self, completion: Completion) -> None:
        self.scheduler.finish(completion.request)
        completion.finish()
        self.ended.add(completion.request)
        del self._completions[completion.request.request_id]
        prompt_id = completion.request.request_id.rpartition("-")[0]
        if prompt_id in self._watched and self._watched[prompt_id][0].finished:
            state, ended = self._watched.pop(prompt_id)
            ended.append(state)

    def _count(self, plan: SchedulerOutput, result: RunnerOutput, accepted: int, seconds: float) -> EngineStats:
        """Add a step to the counts; returns those of the step."""
        step = EngineStats(
            steps=1,
            tokens=sum(plan.num_scheduled_tokens.values()),
            generated_tokens=sum(map(len, result.sampled_token_ids.values())),
            drafted_tokens=sum(map(len, plan.draft_token_ids.values())),
            accepted_tokens=accepted,
            seconds=seconds,
            model_seconds=result.model_seconds,
        )
        self.stats.add(step)
        return step
