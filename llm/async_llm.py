"""`AsyncLLM`: an `LLM` for asyncio, as vLLM's engine of that name, and the thread that runs its requests.

Tokenizing, steps and decoding run in the thread; event loops only hand over requests and take outputs. What may take
longer than a step, long prompts and what constrains answers, is read by other threads beside the steps: no request
waits until another's is read. An output is made when its caller has taken the last one, so that a slow caller gets
fewer and longer ones; and where many callers wait for many short steps, not at every step, so that handing outputs
over, and what callers do with them, take a small share of the time. Beginnings and ends are handed over at once.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter, thread_time
from types import TracebackType
from typing import Any

from llm.base.checks import check_choice, check_flag, known_names, refuse
from llm.base.locks import tell_of_forks
from llm.base.types import JsonObject
from llm.calls.arguments import check_priority, give_adapters, give_priority, with_inside
from llm.calls.chat import ChatOptions, ChatPrompt, Conversations
from llm.calls.pooling import PoolingCall
from llm.calls.stream import OngoingRequest, PooledRequest, Reading
from llm.config.arguments import CALLS
from llm.engine.engine import Engine
from llm.engine.prompts import list_prompts
from llm.engine.request import without_frames
from llm.engine.rows import RefusedRow, Row
from llm.errors import EngineClosedError, LLMError, ValidationError
from llm.inputs import LoRARequest
from llm.inside.request import Captures, Interventions
from llm.llm import LLM
from llm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from llm.pooling_params import PoolingParams
from llm.sampling_params import RequestOutputKind, SamplingParams

# Between two steps that hand outputs over pass this many times what that took, here and in the threads of callers,
# which have the same GIL, if there were more than a few; and at most so many seconds.
_PAUSE = 24.0
_LONGEST_PAUSE = 0.1
_FEW = 4
# Prompts of more characters or tokens, and chats of more messages, are read by other threads.
_LONG = 1 << 16
_MANY_MESSAGES = 256
_MANY_WORDS = 64
_READERS = 2
PAUSES = ("abort", "wait", "keep")
_SHUT_DOWN = "this AsyncLLM is shut down; make a new one."
_LOST = "the request was dropped because another call on its LLM failed; start it again."


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
        capture: Captures = None,
        interventions: Interventions = None,
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
            capture: as for `LLM.generate`; the last output has the activations.
            interventions: as for `LLM.generate`.

        Raises:
            ValidationError: the prompt or the params are wrong; other requests go on.
            LLMError: the engine failed, which ends all requests; `__cause__` is the failure. New ones can run.
            EngineClosedError: `shutdown` was called, or the LLM was closed.
        """
        check_priority([priority], 1)
        params = with_inside(sampling_params, capture, interventions, self.llm.get_default_sampling_params)
        call = self._gather(request_id, prompt, params, tokenization_kwargs, lora_request, priority)
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
        capture: Captures = None,
        interventions: Interventions = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for one conversation; the arguments are those of `LLM.chat`.

        The last output has `content`, `reasoning` and `tool_calls`, of the whole reply also where `output_kind` is
        DELTA. Those before it, where it is CUMULATIVE, have what is certain: nothing that may yet be a call, and
        of the last call the arguments as far as they are written.
        """
        options = ChatOptions.of(locals())
        prompt = ChatPrompt(messages, options)
        params = with_inside(sampling_params, capture, interventions, self.llm.get_default_sampling_params)
        return self.generate(prompt, params, request_id, lora_request=lora_request, priority=priority)

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


@dataclass(eq=False)
class Call:
    """One request of one caller.

    Attributes:
        loop: the caller's.
        pools: it is one of `encode`, with `PoolingParams`.
        outputs: those that were not taken yet; the last may be the error that ended the request.
        changed: set in the caller's loop when `outputs` has grown.
        request, is_aborted: the engine thread's; `request` is None until it is in the engine.
        made: of a long one, what another thread has made of it: what queues it, or what is wrong with it.
    """

    request_id: str
    prompt: object
    params: Any  # SamplingParams, PoolingParams or None
    tokenization_kwargs: Mapping[str, object] | None
    loop: asyncio.AbstractEventLoop
    lora_request: LoRARequest | None = None
    priority: int = 0
    pools: bool = False
    outputs: deque[Any] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    request: OngoingRequest | PooledRequest | None = None
    is_aborted: bool = False
    made: Made | Exception | None = None

    def is_long(self) -> bool:
        """Whether reading it may take longer than a step."""
        given = self.prompt
        if isinstance(given, ChatPrompt):
            listed = list(given.messages) if isinstance(given.messages, list | tuple) else []
            if given.options.tools or len(listed) > _MANY_MESSAGES or _num_letters(listed) > _LONG:
                return True
        elif isinstance(given, Mapping):
            given = given.get("prompt") or given.get("prompt_token_ids")
        if isinstance(given, str | list | tuple) and len(given) > _LONG:
            return True
        params = self.params if isinstance(self.params, SamplingParams) else None
        return params is not None and (
            params.structured_outputs is not None or len(params.bad_words or ()) > _MANY_WORDS
        )

    async def next_output(self) -> Any:
        """The next output; raises the error that ended the request."""
        while not self.outputs:
            self.changed.clear()
            await self.changed.wait()
        output = self.outputs.popleft()
        if isinstance(output, Exception):
            raise output
        return output


Made = tuple[Row, Callable[[Engine, Row], OngoingRequest | PooledRequest]]


def _num_letters(messages: Sequence[object]) -> int:
    """Of a conversation's texts."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    texts = [*contents, *(part.get("text") for part in parts if isinstance(part, Mapping))]
    return sum(len(text) for text in texts if isinstance(text, str))


class EngineThread:
    """Runs the requests of all callers as one batch. The thread starts with the first request.

    Attributes:
        error: the engine's last failure; None: there was none.
        ended: why no request can run any more; None: they can.
    """

    def __init__(self, llm: LLM) -> None:
        self.error: BaseException | None = None
        self.ended: LLMError | None = None
        self._llm = llm
        # Shared with the callers, under this lock.
        self._changed = threading.Condition()
        self._commands: list[Callable[[Engine], None]] = []
        self._waiting: dict[Call, None] = {}  # not in the engine yet, in order
        self._is_stopped = False  # the thread is to end
        self._thread: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        tell_of_forks(self)
        # The engine thread's own.
        self._reading: dict[Call, None] = {}  # long ones that are not in the engine yet
        self._paused: str | None = None  # one of `PAUSES`
        self._held: list[Call] = []  # that came meanwhile
        self._pausing: list[tuple[bool, Callable[[], None]]] = []  # (clear the prefix cache, tell that it is done)
        # Requests in the engine, by the callers' ids.
        self._live: dict[str, Call] = {}
        self._tell_at = 0.0  # what is neither a beginning nor an end
        self._hearing = 0.0  # seconds that many callers took with their outputs; their event loops write it

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue requests, which start in one step if there is room; long ones when they have been read."""
        self._waiting.update(dict.fromkeys(calls))
        long = [call for call in calls if call.is_long()]
        try:
            self._post(
                *(partial(self._read_apart if call in long else self._admit, call) for call in calls), start=True
            )
        except Exception as error:  # the system has no more threads
            self._fail(error)
        if self.ended is not None:
            self._fail(self.ended)

    def abort(self, request_id: str) -> None:
        """End a request where it is; its caller gets what there is. Ids of finished or unknown ones are passed over."""
        self._post(partial(self._abort, request_id))

    def leave(self, call: Call) -> None:
        """The caller takes no more outputs: drop its request, if it is not finished."""
        self._post(partial(self._drop, call))

    def pause(self, mode: str, clear_cache: bool, done: Callable[[], None]) -> None:
        """Start no request and, by `mode`, end, finish or freeze those that run; `done` is called in the thread."""
        try:
            self._post(partial(self._pause, mode, clear_cache, done), start=True)
        except Exception as error:  # the system has no more threads
            self._fail(error)
            done()
        if self.ended is not None:
            done()

    def resume(self) -> None:
        self._post(self._resume)

    def stop(self) -> None:
        """End the thread after its step. Requests that are left end with `EngineClosedError`."""
        with self._changed:
            self._is_stopped = True
            self.ended = self.ended or EngineClosedError(_SHUT_DOWN)
            self._changed.notify()
        # The garbage collector may call this in the thread itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def _post(self, *commands: Callable[[Engine], None], start: bool = False) -> None:
        with self._changed:
            self._commands += commands
            if start and self._thread is None and not self._is_stopped:
                # A daemon, so that a program can end; `AsyncLLM` stops the thread before the interpreter goes.
                thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def after_fork(self) -> None:
        """In a forked child, which has neither the thread nor the callers that its requests are for."""
        self._changed = threading.Condition()
        self._thread, self._readers = None, None
        self._commands, self._waiting, self._reading = [], {}, {}
        live, self._live = [*self._live.values()], {}
        self._llm._drop(*(call.request.state for call in live if call.request is not None))

    def _run(self) -> None:
        try:
            self._run_until_stopped()
        except BaseException as error:  # of telling that a step failed, or in the middle of waiting
            self.error = without_frames(error)
            self.ended = EngineClosedError(f"the thread of this AsyncLLM has ended ({_said(error)}); make a new one.")
        finally:
            self._is_stopped = True
            self._fail(self.ended or EngineClosedError(_SHUT_DOWN))

    def _run_until_stopped(self) -> None:
        while True:
            with self._changed:
                while not (self._runs() or self._commands or self._is_stopped):
                    self._changed.wait()
                commands, self._commands = self._commands, []
            if self._is_stopped:
                break
            self._advance(commands)

    def _advance(self, commands: Sequence[Callable[[Engine], None]]) -> None:
        """Do what callers ask, step, and tell them. A failure ends all requests, not the thread: also one that would
        end a program, such as `SystemExit` from a logits processor."""
        try:
            with self._llm._exclusive():
                engine = self._llm._begin()
                for command in commands:
                    command(engine)
                if self._runs() and engine.scheduler.has_unfinished():
                    engine.step()
                self._tell(engine)
                self._end_pausing(engine)
                if not self._live:
                    engine.end_call()
        except BaseException as error:
            self.error = without_frames(error)
            self._fail(error)

    def _runs(self) -> bool:
        return bool(self._live) and self._paused != "keep"

    def _pause(self, mode: str, clear_cache: bool, done: Callable[[], None], engine: Engine) -> None:
        self._paused = mode
        if mode == "abort":
            for name in self._live:
                self._abort(name, engine)
        self._pausing.append((clear_cache, done))

    def _end_pausing(self, engine: Engine) -> None:
        """Tell who pauses, once no request runs any more."""
        if self._pausing and not self._runs():
            waiting, self._pausing = self._pausing, []
            if any(clear for clear, _ in waiting) and not self._live:
                engine.reset_prefix_cache()
            for _, done in waiting:
                done()

    def _resume(self, engine: Engine) -> None:
        self._paused = None
        held, self._held = self._held, []
        for call in held:
            self._admit(call, engine)

    def _admit(self, call: Call, engine: Engine) -> None:
        """Tokenize and queue a prompt. What is wrong with it is its caller's error alone."""
        self._reading.pop(call, None)
        if call not in self._waiting:  # a failure has ended it, or its caller
            return
        if self._paused is not None:
            self._held.append(call)
            return
        try:
            if call.request_id in self._live:
                problem = f"request_id must be the id of no unfinished request, got {call.request_id!r}."
                raise ValidationError(problem, parameter="request_id", value=call.request_id)
            made = self._row(call) if call.made is None else call.made
            if isinstance(made, Exception):
                raise made
            row, queue = made
            give_adapters(engine, [row], call.lora_request)
            give_priority([row], call.priority)
        except Exception as error:
            del self._waiting[call]
            _answer([(call, error.with_traceback(None))])
            return
        call.request = queue(engine, row)
        self._live[call.request_id] = call
        del self._waiting[call]

    def _row(self, call: Call) -> Made:
        """The row of a prompt or a conversation, and what queues it."""
        if call.pools:
            pooling = PoolingCall(self._llm, call.params, False, call.lora_request, call.tokenization_kwargs)
            pooled, make = pooling.encoding(call.prompt, None if call.params is None else call.params.task)
            return pooled, lambda engine, row: PooledRequest(engine.add(row), make)
        preprocessor, default = self._llm._preprocessor, self._llm.get_default_sampling_params
        asked: Conversations | None = None
        if isinstance(call.prompt, ChatPrompt):
            asked = call.prompt.options.conversations(preprocessor, call.prompt.messages, call.params, default)
        listed = list_prompts(call.prompt if asked is None else asked.prompts)
        if len(listed) != 1:
            message = f"generate takes one prompt, got {len(listed)}; call it for each."
            raise ValidationError(message, parameter="prompt", value=len(listed))
        params = call.params if asked is None else asked.params
        [row] = preprocessor.checked_rows(listed, params, default, call.tokenization_kwargs)
        if isinstance(row, RefusedRow):
            raise row.error
        return row, partial(_queue, read=None if asked is None else asked.read_one)

    def _read_apart(self, call: Call, engine: Engine) -> None:
        """Have the row of a long request made by a thread of its own."""
        if call not in self._waiting:  # its caller has left
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="llm-read")
        self._reading[call] = None
        try:
            self._readers.submit(self._read, call)
        except RuntimeError:  # the system has no more threads
            self._admit(call, engine)

    def _read(self, call: Call) -> None:
        try:
            if call in self._waiting:
                call.made = self._row(call)
        except BaseException as error:
            call.made = error.with_traceback(None) if isinstance(error, Exception) else _of_caller(error)
        self._post(partial(self._admit, call))

    def _abort(self, request_id: str, engine: Engine) -> None:
        call = self._live.get(request_id)
        if call is not None and call.request is not None:
            call.is_aborted = True
            engine.abort([call.request.state])
        for own in [own for own in (*self._held, *self._reading) if own.request_id == request_id]:
            if own in self._waiting:
                del self._waiting[own]
                _answer([(own, LLMError("the request was aborted before it started."))])

    def _drop(self, call: Call, engine: Engine) -> None:
        if self._live.get(call.request_id) is call and call.request is not None:
            del self._live[call.request_id]
            engine.abort([call.request.state])
        self._waiting.pop(call, None)  # it was held back

    def _tell(self, engine: Engine) -> None:
        answers: list[tuple[Call, object]] = []
        started = perf_counter()
        is_time = started >= self._tell_at
        for name, call in list(self._live.items()):
            if call.loop.is_closed():
                self._drop(call, engine)
                continue
            if call.request is None or not call.request.is_due(is_time and not call.outputs):
                continue
            output = call.request.next_output(name)
            if output is None:
                continue
            if isinstance(output, LLMError) or output.finished:
                del self._live[name]
            is_lost = not call.is_aborted and _is_cut_off(output)
            answers.append((call, LLMError(_LOST) if is_lost else output))
        _answer(answers, self._heard)
        if len(answers) > _FEW:
            now = perf_counter()
            self._tell_at = now + min(_LONGEST_PAUSE, _PAUSE * (now - started + self._hearing))

    def _heard(self, seconds: float) -> None:
        """The callers of an event loop took so long with their outputs."""
        self._hearing = seconds

    def _fail(self, error: BaseException) -> None:
        """End every request."""
        live, self._live = [*self._live.values()], {}
        waiting = list(self._waiting)
        self._waiting.clear()
        _answer([(call, _of_caller(error)) for call in (*live, *waiting)])
        pausing, self._pausing = self._pausing, []
        for _, done in pausing:
            done()
        self._llm._drop(*(call.request.state for call in live if call.request is not None))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _of_caller(error: BaseException) -> Exception:
    """The engine's error as one caller gets it: a new object for each, because raising it adds the caller's frames."""
    if isinstance(error, EngineClosedError):
        return EngineClosedError(str(error))
    own = LLMError(f"the engine failed and dropped its requests ({_said(error)}); the next can run.")
    own.__cause__ = error
    return own


def _queue(engine: Engine, row: Row, read: Reading | None) -> OngoingRequest:
    kind = row.params.output_kind
    return OngoingRequest(engine.add(row, streaming=kind is not RequestOutputKind.FINAL_ONLY), kind, read)


def _is_cut_off(output: object) -> bool:
    """True if the request was aborted."""
    if isinstance(output, RequestOutput):
        return any(own.finish_reason == "abort" for own in output.outputs)
    return isinstance(output, LLMError)


def _answer(answers: Sequence[tuple[Call, object]], heard: Callable[[float], None] | None = None) -> None:
    """Give outputs to their callers, waking each event loop once. `heard` is called in a loop that had many to wake,
    with the seconds of its thread that they took."""
    woken: defaultdict[asyncio.AbstractEventLoop, list[Call]] = defaultdict(list)
    for call, output in answers:
        call.outputs.append(output)
        woken[call.loop].append(call)
    for loop, calls in woken.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_wake, loop, calls, heard)


def _wake(loop: asyncio.AbstractEventLoop, calls: Sequence[Call], heard: Callable[[float], None] | None) -> None:
    started = thread_time()
    for call in calls:
        call.changed.set()
    if heard is not None and len(calls) > _FEW:
        # After the tasks that wait for these.
        loop.call_soon(lambda: heard(thread_time() - started))
