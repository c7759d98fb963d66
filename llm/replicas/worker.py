"""The role of a replica: an ordinary engine, whose requests come, and whose outputs leave, as messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llm.engine.engine import Engine
from llm.engine.output import Completion
from llm.engine.preprocess import Preprocessor
from llm.engine.request import without_frames
from llm.engine.scheduler import scheduler_maker
from llm.engine.stats import EngineStats
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.errors import RankError, WorkerDiedError
from llm.replicas.schema import SCHEMA as SCHEMA
from llm.replicas.schema import (
    EndedRow,
    MethodCall,
    MethodResult,
    ReplicaArgs,
    ReplicaLoaded,
    SentRequest,
    StepError,
    StepReport,
)
from llm.sampling.logits_processors.pipeline import load_logits_processor
from llm.setup.build import BuiltEngine, build_engine
from llm.workers.connection import Connection
from llm.workers.messages import Message


class ReplicaEngine(Engine):
    """An engine that reports each step by `send`."""

    def __init__(self, built: BuiltEngine, send: Callable[[StepReport], None]) -> None:
        engine, config = built.engine, built.engine.config
        eos = engine.eos_token_ids
        super().__init__(config, scheduler_maker(built.plan), engine.runner, engine.tokenizer, eos)
        self._preprocessor = Preprocessor(config.model_config, engine.tokenizer, eos)
        self._send = send
        self._report = StepReport(RunnerOutput())

    def take(self, row: SentRequest) -> None:
        """Queue a request."""
        params = row.params
        params.structure = params.inside = None
        if params.structured_outputs is not None:
            params.structured_outputs._model = None
            params.structure = self._preprocessor.structure(params.structured_outputs)
        request = row.request(self.eos_token_ids)
        completion = Completion(request, self.tokenizer, streaming=False)
        self._queue(completion, row.token_ids[row.num_prompt_tokens :])

    def drop(self, request_ids: list[str]) -> None:
        """Forget requests; those that have ended are ignored."""
        for request_id in request_ids:
            self._completions.pop(request_id, None)
        self.scheduler.abort(request_ids)

    def step(self) -> None:
        self._report = StepReport(RunnerOutput())
        super().step()

    def _note_scheduled(self, plan: SchedulerOutput) -> None:
        super()._note_scheduled(plan)
        for row in plan.new_rows:
            cached = self._completions[row.request_id].request.num_cached_tokens
            self._report.started[row.request_id] = cached or 0

    def _finish(self, completion: Completion) -> None:
        super()._finish(completion)
        request = completion.request
        self._report.ended[request.request_id] = EndedRow(
            request.num_preemptions, request.num_drafted_tokens, request.num_accepted_tokens
        )

    def _count(self, plan: SchedulerOutput, result: RunnerOutput, accepted: int, seconds: float) -> EngineStats:
        report = self._report
        report.stats = super()._count(plan, result, accepted, seconds)
        for request_id in plan.num_scheduled_tokens:
            if request_id in self._completions and request_id not in result.sampled_token_ids:
                report.computed[request_id] = self._completions[request_id].request.num_computed_tokens
        # Drafts stay here, and an error goes without its frames.
        report.result = replace(
            result,
            draft_token_ids={},
            errors={request_id: without_frames(error) for request_id, error in result.errors.items()},
        )
        report.kv_cache_used = self.gauges().kv_cache_used
        self._send(report)
        return report.stats


class _Replica:
    def __init__(self, connection: Connection, args: ReplicaArgs) -> None:
        built = build_engine(args.engine, args.shared_weights)
        self._connection = connection
        self._reset = 0
        self.engine = ReplicaEngine(built, lambda report: connection.send("step", report))
        config, cache = self.engine.config, self.engine.config.cache_config
        loaded = ReplicaLoaded(
            config.invariant,
            dict(config.reasons),
            cache.num_blocks,
            cache.kv_cache_memory_bytes,
            config.speculative_config is not None,
            dict(built.startup),
            built.shared_bytes,
        )
        connection.send("loaded", loaded)

    def do(self, message: Message) -> None:
        kind, body = message
        if kind == "rows" and isinstance(body, list):
            for row in body:
                self.engine.take(row)
        elif kind == "abort" and isinstance(body, list):
            self.engine.drop(body)
        elif kind == "reset" and isinstance(body, int):
            self._reset = body
            self.engine.reset()
        elif kind == "call" and isinstance(body, MethodCall):
            self._connection.send("result", self._call(body))
        else:
            raise ValueError(f"a replica was sent {kind!r}, which it does not know")

    def step(self) -> None:
        try:
            self.engine.step()
        except (EOFError, RankError, WorkerDiedError):  # a replica without one of its ranks is as good as dead
            raise
        except Exception as error:  # the engine has dropped every request
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._connection.send("error", StepError(self._reset, without_frames(error)))

    def _call(self, call: MethodCall) -> MethodResult:
        try:
            return MethodResult(call.number, self._result(call.method, call.args))
        except Exception as error:
            return MethodResult(call.number, error=without_frames(error))

    def _result(self, method: str, args: tuple[object, ...]) -> object:
        if method == "reset_prefix_cache":
            self.engine.reset_prefix_cache()
            return None
        if method == "set_processors":
            self.engine.runner.set_processors([load_logits_processor(str(name)) for name in args])
            return None
        return getattr(self.engine.runner, method)(*args)


def serve(connection: Connection, number: int) -> None:
    message = connection.receive()
    if message is None or not isinstance(message.body, ReplicaArgs):
        raise ValueError("the first message to a replica is what it loads")
    replica = _Replica(connection, message.body)
    engine, is_idle = replica.engine, True
    while True:
        # All messages that are there come before the next step; with nothing to do the replica waits.
        while (message := connection.receive(None if is_idle else 0)) is not None:
            try:
                replica.do(message)
            except Exception as error:
                engine.reset()
                replica.fail(error)
            is_idle = not engine.scheduler.has_unfinished()
        replica.step()
        is_idle = not engine.scheduler.has_unfinished()
        if is_idle:
            engine.end_call()
