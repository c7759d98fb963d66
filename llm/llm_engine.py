"""`LLMEngine`: an `LLM` that is driven step by step, request by request, as vLLM's engine of that name.

It keeps which requests were added; `llm.calls.stream` what each has returned so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm.base.checks import known_names, refuse
from llm.calls.arguments import adapters_of, give_adapters, give_priority
from llm.calls.stream import OngoingRequest
from llm.calls.whole_model import Worker
from llm.config.engine import EngineConfig, ModelConfig
from llm.engine.interrupt import InterruptGuard
from llm.errors import GenerationInterrupted, ValidationError
from llm.inputs import LoRARequest
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.llm import LLM


@dataclass(frozen=True)
class Executor:
    """Stands in for vLLM's executor: there is one worker, in this process."""

    driver_worker: Worker


class LLMEngine:
    """vLLM's loop: `add_request` as prompts come, `step` while `has_unfinished_requests`.

    `output_kind` of a request's params says what a step returns of it: all of it so far, what is new, or all of it once
    it has ended.

    Attributes:
        llm: what is driven; its methods can be called between two steps.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._added: dict[str, OngoingRequest] = {}

    @classmethod
    def from_engine_args(
        cls,
        engine_args: object,
        usage_context: object = None,
        stat_loggers: None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """An engine for an `EngineArgs`. Nothing is reported or logged, and there is one process, whatever is asked."""
        from llm import LLM

        return cls(LLM.from_engine_args(engine_args))

    @known_names("LLMEngine.add_request")
    def add_request(
        self,
        request_id: str,
        prompt: object,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; returns its id.

        Raises:
            ValidationError: the prompt or the params are wrong, or the id is that of an unfinished request.
        """
        if not isinstance(request_id, str):
            refuse("request_id", request_id, "a text")
        if request_id in self._added:
            refuse("request_id", request_id, "the id of no unfinished request")
        llm = self.llm
        with InterruptGuard() as guard, llm._exclusive():
            engine = llm._begin()
            default = llm.get_default_sampling_params
            rows = llm._preprocessor.rows(prompt, params, default, tokenization_kwargs)
            if len(rows) != 1:
                message = f"add_request takes one prompt, got {len(rows)}; call it for each."
                raise ValidationError(message, parameter="prompt", value=len(rows))
            give_adapters(engine, rows, lora_request)
            give_priority(rows, priority)
            kind = rows[0].params.output_kind
            self._added[request_id] = OngoingRequest(engine.add(rows[0], streaming=True), kind)
        if guard.requested:
            raise GenerationInterrupted([])
        return request_id

    def step(self) -> list[RequestOutput]:
        """One step of all requests; the outputs of those that got further, in the order in which they were added."""
        with InterruptGuard() as guard, self.llm._exclusive():
            engine = self.llm._begin()
            if self._added:
                engine.step()
            outputs = [output for name in list(self._added) if (output := self._output_of(name)) is not None]
            if not self._added:
                engine.end_call()
        if guard.requested:
            raise GenerationInterrupted([])
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._added)

    def get_num_unfinished_requests(self) -> int:
        return len(self._added)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests; ids of finished or unknown ones are passed over."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self.llm._exclusive():
            self.llm._begin().abort([self._added.pop(name).state for name in names if name in self._added])

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter's files against the model; True. It is loaded when the first request with it starts.

        Raises ValidationError, CheckpointError: it cannot be used.
        """
        with self.llm._exclusive():
            adapters_of(self.llm._begin(), [lora_request], 1)
        return True

    @property
    def vllm_config(self) -> EngineConfig:
        return self.llm.config

    @property
    def model_config(self) -> ModelConfig:
        return self.llm.config.model_config

    @property
    def model_executor(self) -> Executor:
        """By which scripts reach the model, `model_executor.driver_worker.model_runner.model`; as `LLM.apply_model`."""
        [model] = self.llm.apply_model(lambda model: model)
        return Executor(Worker(model, self.llm.config))

    @property
    def tokenizer(self) -> object:
        return self.llm.get_tokenizer()

    def get_tokenizer(self) -> object:
        return self.llm.get_tokenizer()

    def _output_of(self, name: str) -> RequestOutput | None:
        """What the request's `output_kind` asks to tell now; a finished request is forgotten."""
        request = self._added[name]
        if request.state.finished:
            del self._added[name]
        return request.next_output(name)
