"""`AsyncLLM`: an `LLM` for asyncio, as vLLM's engine of that name.

Owns the public class; `engine_thread.py` has the thread that runs the requests.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from llm.base.checks import check_choice, check_flag, known_names, refuse
from llm.base.types import JsonObject
from llm.calls.arguments import check_priority
from llm.calls.chat import ChatOptions, ChatPrompt
from llm.calls.engine_thread import PAUSES, Call, EngineThread
from llm.config.arguments import CALLS
from llm.errors import EngineClosedError
from llm.inputs import LoRARequest
from llm.llm import LLM
from llm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from llm.pooling_params import PoolingParams
from llm.sampling_params import SamplingParams


class AsyncLLM:
    """Generate for many tasks at once: their requests share a batch, and each may come and go at any time.

    The event loop is never blocked: a thread, the only one, tokenizes, computes and decodes. Answers are those of
    `LLM.generate`, bit for bit. Tasks of several event loops may share one.

    Args:
        llm: what is driven. Its own methods can be called from other threads between two steps; `shutdown` leaves it
            open. None: one is made of `arguments`, those of `LLM`.

    Attributes:
        llm: as given; or made from the arguments, also of `from_engine_args`, and closed by `shutdown`.
    """

    def __init__(self, llm: LLM | None = None, **arguments: Any) -> None:
        if llm is not None and arguments:
            refuse("llm", llm, f"left out with arguments of LLM ({', '.join(arguments)})")
        if isinstance(llm, str | Path):
            refuse("llm", llm, "an LLM; name a model with model=")
        self._owns = llm is None
        self.llm = LLM(**arguments) if llm is None else llm
        self._thread = EngineThread(self.llm)
        self._paused = False
        self._numbers = count()
        self._gathered: defaultdict[asyncio.AbstractEventLoop, list[Call]] = defaultdict(list)
        # Also before the interpreter ends, and when this object is collected.
        self._stop = weakref.finalize(self, self._thread.stop)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: object,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: None = None,
    ) -> AsyncLLM:
        """An engine for an `AsyncEngineArgs` or `EngineArgs`. Nothing is reported or logged, whatever is asked; the
        thread starts with the first request."""
        given = {name: value for name, value in vars(engine_args).items() if name != "enable_log_requests"}
        return cls(**given)

    @known_names("AsyncLLM.generate")
    async def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of one prompt until it is `finished`; `sampling_params.output_kind` says what is in each: the
        whole answer so far (the default), what is new of it, or the whole answer, once.

        Cancelling the task, or leaving the loop, drops the request and frees its blocks. A request that a task no
        longer iterates over is dropped when its generator is closed (`aclose`, `contextlib.aclosing`) or collected.

        Args:
            prompt: as one prompt of `LLM.generate`.
            lora_request: its adapter.
            sampling_params: None: the model's defaults. Without a seed, one is derived from the order of the requests.
            request_id: of no unfinished request; None: one is made.

        Raises:
            ValidationError: the prompt or the params are wrong; other requests go on.
            LLMError: the engine failed, which ends all requests; `__cause__` is the failure. New ones can run.
            EngineClosedError: `shutdown` was called, or the LLM was closed.
        """
        check_priority([priority], 1)
        call = self._gather(request_id, prompt, sampling_params, tokenization_kwargs, lora_request, priority)
        finished = False
        try:
            while not finished:
                output: RequestOutput = await call.next_output()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._thread.leave(call)

    @known_names("AsyncLLM.chat", CALLS)
    def chat(
        self,
        messages: Sequence[object],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[JsonObject] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        priority: int = 0,
        tool_parser: str | None = "auto",
        tool_choice: str | JsonObject | None = None,
        parallel_tool_calls: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for one conversation; the arguments are those of `LLM.chat`.

        The last output has `content`, `reasoning` and `tool_calls`, of the whole reply also where `output_kind` is
        DELTA.
        """
        options = ChatOptions(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            tokenization_kwargs,
            tool_parser,
            tool_choice,
            parallel_tool_calls,
        )
        prompt = ChatPrompt(messages, options)
        return self.generate(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)

    def _gather(
        self,
        request_id: str | None,
        prompt: object,
        params: SamplingParams | PoolingParams | None,
        tokenization_kwargs: Mapping[str, object] | None,
        lora_request: LoRARequest | None,
        priority: int,
        pools: bool = False,
    ) -> Call:
        """Hand in a request of this task."""
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        if not isinstance(name, str):
            refuse("request_id", name, "a text, or None")
        loop = asyncio.get_running_loop()
        call = Call(name, prompt, params, tokenization_kwargs, loop, lora_request, priority, pools)
        if not self._gathered[loop]:
            loop.call_soon(self._submit, loop)
        self._gathered[loop].append(call)
        return call

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs after the tasks that were ready: gathered requests reach the thread together, and start in one step."""
        self._thread.submit(self._gathered.pop(loop))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests where they are: their last outputs have what there is, and finish_reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            asyncio.get_running_loop().call_soon(self._thread.abort, name)

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Return when no request is computed, so that `llm.apply_model` may change the weights. Requests that come
        meanwhile wait for `resume_generation`.

        Args:
            mode: of requests that run: "abort" ends them with what there is, "wait" lets them finish, "keep" freezes
                them until generation is resumed.
            wait_for_inflight_requests: True: vLLM's older name of mode="wait".
            clear_cache: drop the prefix cache, unless there are frozen requests.
        """
        check_choice("mode", mode, PAUSES)
        for name, value in (("wait_for_inflight_requests", wait_for_inflight_requests), ("clear_cache", clear_cache)):
            if value is not None:
                check_flag(name, value)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(done.set)

        self._paused = True
        # After the requests that were handed in before.
        loop.call_soon(self._thread.pause, "wait" if wait_for_inflight_requests else mode, clear_cache, tell)
        await done.wait()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._paused = False
        self._thread.resume()

    async def is_paused(self) -> bool:
        return self._paused

    @known_names("AsyncLLM.encode")
    async def encode(
        self,
        prompt: object,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield what a pooling model makes of one prompt, once; `pooling_params.task` as `LLM.encode`'s `pooling_task`.

        Prompts of several tasks share steps, as those of `generate`. Cancelling, `abort` (which raises LLMError here)
        and errors are as of `generate`.
        """
        check_priority([priority], 1)
        if not isinstance(pooling_params, PoolingParams | None):
            refuse("pooling_params", pooling_params, "PoolingParams, or None")
        call = self._gather(request_id, prompt, pooling_params, tokenization_kwargs, lora_request, priority, pools=True)
        output = None
        try:
            output = await call.next_output()
        finally:
            if output is None:
                self._thread.leave(call)
        yield output

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLMEngine.add_lora`."""
        return await asyncio.to_thread(self.llm.llm_engine.add_lora, lora_request)

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> object:
        """The tokenizer as an object of transformers; an adapter has none of its own."""
        return self.llm.get_tokenizer()

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; does nothing and returns False while there are requests."""
        return await asyncio.to_thread(self.llm.reset_prefix_cache)

    async def check_health(self) -> None:
        """Raises `EngineClosedError` if no request can run."""
        if self._thread.ended is not None:
            raise EngineClosedError(str(self._thread.ended))
        self.llm._open_engine()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its current step, and free the model if `from_engine_args` made it. Tasks that wait for
        outputs get `EngineClosedError`. May be called again."""
        self._stop()
        if self._owns:
            self.llm.close()

    @property
    def is_running(self) -> bool:
        return self._thread.ended is None

    @property
    def is_stopped(self) -> bool:
        return self._thread.ended is not None

    @property
    def errored(self) -> bool:
        """The thread has ended by an error. After a failure of a step new requests can run, and this is False;
        `dead_error` is the last failure."""
        return self.is_stopped and self._stop.alive

    @property
    def dead_error(self) -> BaseException | None:
        return self._thread.error

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
