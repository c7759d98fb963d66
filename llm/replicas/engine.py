"""The engine over replicas: it has the requests and their outputs, and the replicas compute its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, perf_counter

from llm.base.types import JsonObject
from llm.config.engine import EngineConfig, SchedulerConfig
from llm.engine.engine import Engine
from llm.engine.output import PromptState
from llm.engine.request import Request, RequestStatus
from llm.engine.rows import Row
from llm.engine.scheduler import Scheduler
from llm.engine.stats import Gauges, LLMStats
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.errors import ValidationError, WorkerDiedError
from llm.replicas.dispatch import Dispatcher
from llm.replicas.processes import WAIT_SECONDS, Replicas
from llm.replicas.runner import ReplicaRunner, refuse_replicated
from llm.replicas.schema import MethodResult, ReplicaLoaded, SentRequest, StepError, StepReport
from llm.text.tokenizer import Tokenizer
from llm.workers.messages import Message

logger = logging.getLogger("llm")


class ReplicaScheduler(Scheduler):
    """Hands requests to replicas in place of planning steps; a replica has a scheduler of its own."""

    def __init__(self, config: SchedulerConfig, replicas: Replicas) -> None:
        self.config = config
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.dispatcher = Dispatcher(replicas.alive, config.max_num_seqs, config.scheduling_policy == "priority")
        self._replicas = replicas
        self._aborted: dict[int, list[str]] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.dispatcher.add(request)

    def hand_out(self) -> None:
        """Send what replicas have room for, and what was aborted."""
        for number, ids in self._aborted.items():
            if number in self._replicas.alive:
                self._replicas.send(number, "abort", ids)
        self._aborted.clear()
        rows: dict[int, list[SentRequest]] = {}
        for number, request in self.dispatcher.hand_out():
            rows.setdefault(number, []).append(SentRequest.of(request))
            request.status = RequestStatus.RUNNING
        for number, handed in rows.items():
            self._replicas.send(number, "rows", handed)

    def schedule(self) -> SchedulerOutput:
        raise RuntimeError("replicas plan their own steps")

    def finish(self, request: Request) -> None:
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        self.dispatcher.end(request.request_id)

    def abort(self, request_ids: Sequence[str]) -> None:  # type: ignore[override]
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                request.finish("abort")
                request.status = RequestStatus.FINISHED
                replica = self.dispatcher.end(request_id)
                if replica is not None:
                    self._aborted.setdefault(replica, []).append(request_id)

    def remove_finished(self) -> None:
        """Nothing: they are in no queue."""

    def lose(self, number: int) -> int:
        """Queue the requests of a dead replica again, and tell how many they are."""
        lost = self.dispatcher.lose(number)
        for request in lost:
            request.num_preemptions += 1
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
            self.dispatcher.add(request)
        self.num_preemptions += len(lost)
        return len(lost)

    def check_integrity(self) -> None:
        held = [request_id for requests in self.dispatcher.held.values() for request_id in requests]
        if len(held) + self.dispatcher.num_waiting != len(self.requests) or not set(held) <= set(self.requests):
            raise RuntimeError("a request is nowhere, or twice")


class ReplicatedEngine(Engine):
    """As `Engine`; between its steps the replicas go on with what they have."""

    scheduler: ReplicaScheduler

    def __init__(
        self, config: EngineConfig, replicas: Replicas, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
    ) -> None:
        runner = ReplicaRunner(replicas)
        super().__init__(
            config, lambda: ReplicaScheduler(config.scheduler_config, replicas), runner, tokenizer, eos_token_ids
        )
        self._replicas = replicas
        self._used: dict[int, float] = {}  # replica -> share of its KV cache

    @property
    def max_num_seqs(self) -> int:
        return super().max_num_seqs * max(1, len(self._replicas.alive))

    def gauges(self) -> Gauges:
        running = sum(request.num_computed_tokens > 0 for request in self.scheduler.requests.values())
        used = [self._used.get(number, 0.0) for number in self._replicas.alive]
        waiting = len(self.scheduler.requests) - running
        return Gauges(running, waiting, sum(used) / len(used) if used and running else 0.0)

    def all_stats(self) -> LLMStats:
        found, count = super().all_stats(), len(self._replicas.alive)
        shared = max(0, count - len(self._replicas.files)) * self._replicas.shared_bytes
        return replace(
            found, weight_bytes=count * found.weight_bytes - shared, kv_cache_bytes=count * found.kv_cache_bytes
        )

    def needs_model_here(self, method: str) -> None:
        refuse_replicated(method)

    def reset_prefix_cache(self) -> None:
        self._replicas.call_all("reset_prefix_cache")

    def add(self, row: Row, *, streaming: bool = False, ended: list[PromptState] | None = None) -> PromptState:
        if row.params.logits_processors:
            raise ValidationError(
                "a callable cannot be sent to a replica: write it as a LogitsProcessor class for "
                "LLM(logits_processors=['module:Class']), or use data_parallel_size=1.",
                parameter="logits_processors",
                value=row.params.logits_processors,
            )
        self._replicas.check_alive()
        return super().add(row, streaming=streaming, ended=ended)

    def step(self) -> None:
        """Hand out what there is room for, wait for a replica's report for a moment, and take all that are there.

        Raises:
            WorkerDiedError: no replica is left. Other errors are those of `Engine.step`; every request is dropped then.
        """
        started = perf_counter()
        try:
            self._replicas.check_alive()
            self._take_all()  # a replica whose end is known gets nothing
            self.scheduler.hand_out()
            busy = [number for number, held in self.scheduler.dispatcher.held.items() if held]
            if self.scheduler.requests and not busy and not self.scheduler.dispatcher.num_waiting:
                raise RuntimeError("no replica has the requests that are left")
            found = self._replicas.take(WAIT_SECONDS, busy)
            if found is not None:
                self._take(*found)
                self._take_all()
            self.scheduler.hand_out()
        except BaseException:
            self.reset()
            raise
        self.stats.seconds += perf_counter() - started

    def _take_all(self) -> None:
        """All that is there."""
        while (found := self._replicas.take(0, ())) is not None:
            self._take(*found)

    def _take(self, number: int, message: Message | WorkerDiedError) -> None:
        if isinstance(message, WorkerDiedError):
            self._lose(number, message)
        elif isinstance(message.body, ReplicaLoaded):
            self.scheduler.dispatcher.join(number)
        elif isinstance(message.body, StepReport):
            self._apply(number, message.body)
        elif isinstance(message.body, StepError):
            if message.body.reset == self._replicas.resets:
                raise message.body.error
        elif not isinstance(message.body, MethodResult):
            raise RuntimeError(f"replica {number} sent {message.kind!r}")
        elif not message.body.number and message.body.error is not None:  # it joined and cannot do what others have
            raise message.body.error

    def _lose(self, number: int, error: WorkerDiedError) -> None:
        lost = self.scheduler.lose(number)
        follows = self._replicas.what_follows(number)
        self._replicas.check_alive()
        where = "in the others" if self._replicas.alive else "when it has loaded the model"
        logger.warning(
            "%s Its %d requests go on %s (%d of %d are left). %s",
            error,
            lost,
            where,
            len(self._replicas.alive),
            self._replicas.count,
            follows,
        )

    def _apply(self, number: int, report: StepReport) -> None:
        """Append what a replica has computed of the requests that it still has."""
        held = self.scheduler.dispatcher.held.get(number, {})
        for request_id, cached in report.started.items():
            if request_id in held:
                request = held[request_id]
                request.metrics.scheduled_ts = request.metrics.scheduled_ts or monotonic()
                if request.num_cached_tokens is None:
                    request.num_cached_tokens = cached
        for request_id, ended in report.ended.items():
            if request_id in held:
                request = held[request_id]
                request.num_preemptions += ended.num_preemptions
                request.num_drafted_tokens += ended.num_drafted_tokens
                request.num_accepted_tokens += ended.num_accepted_tokens
        for request_id, count in report.computed.items():
            if request_id in held:
                held[request_id].num_computed_tokens = count
        result = _of(report.result, held)
        for request_id, tokens in result.sampled_token_ids.items():
            request = held[request_id]
            request.num_computed_tokens = request.num_tokens + len(tokens) - 1
        self._update(result)
        for request_id in report.ended:
            if request_id in self._completions:
                raise RuntimeError(f"replica {number} has ended request {request_id}, which has not ended here")
        self._used[number] = report.kv_cache_used
        generated = sum(map(len, result.sampled_token_ids.values()))
        # Seconds are those of this engine's steps, in which several replicas compute.
        self.stats.add(replace(report.stats, generated_tokens=generated, seconds=0.0))


def _of(result: RunnerOutput, held: dict[str, Request]) -> RunnerOutput:
    """The part of a result that is of these requests; the others were aborted meanwhile."""
    parts = ("sampled_token_ids", "logprobs", "prompt_logprobs", "prompt_scores", "errors", "pooled")
    own: JsonObject = {
        name: {key: value for key, value in getattr(result, name).items() if key in held} for name in parts
    }
    return replace(result, **own)
