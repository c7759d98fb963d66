"""The endpoint's routes: OpenAI's and vLLM's, answered by an `AsyncLLM`.

Bodies are read by the parsers of batch jobs, and answers have their forms; here is what only a server has: streams,
several prompts in a body, models by name, errors with a status, limits, and clients that go away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm import __version__
from llm.async_llm import AsyncLLM
from llm.base.checks import check_flag, check_integer, is_real, refuse
from llm.base.text import show
from llm.base.types import JsonObject
from llm.calls.chat import ChatOptions, ChatPrompt
from llm.calls.pooling import PairPrompt, ScoredText
from llm.engine.pooling_rows import Scored, is_content, pair_prompts, scored_key
from llm.engine.prompts import Tokenization, parse_prompt
from llm.errors import (
    EngineClosedError,
    LLMError,
    MissingPackageError,
    PromptTooLongError,
    SamplingError,
    ValidationError,
)
from llm.jobs.bodies import (
    chat_body,
    chat_logprobs,
    check_fields,
    completion_body,
    completion_choice,
    error_code,
    finish_of_chat,
    finite,
    text_offsets,
)
from llm.jobs.requests import POOLING_URLS, URLS, BatchRows, BatchVectors, JobAdapters, RowRequest, Wanted, task_of
from llm.jobs.rows import check_conversation, row_error
from llm.outputs import CompletionOutput, Counter, Histogram, Metric, RequestOutput
from llm.pooling_params import PoolingParams
from llm.sampling_params import RequestOutputKind, SamplingParams
from llm.text.open_calls import certain_arguments, rest_of
from llm.text.replies import ToolChoice

logger = logging.getLogger("llm")

T = TypeVar("T")
_CLIENT_GONE = 499  # nobody reads it
# Of a body: reading more takes Python seconds, in which nobody else is answered.
_MOST_OBJECTS = 1 << 17  # arrays, objects and members
_MOST_VALUES = 1 << 21
_OWN_ID = re.compile(r"call(\d{5})")
_SCORE_FIELDS = (
    *("text_1", "text_2", "data_1", "data_2", "queries", "documents"),
    *("dimensions", "truncate_prompt_tokens", "use_activation"),
)
_RERANK_FIELDS = ("query", "documents", "top_n", "dimensions", "truncate_prompt_tokens", "use_activation")
_NO_EFFECT = ("model", "user", "request_id")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"priority": (0,), "add_special_tokens": (True,)}
_OF_TOKENIZE = ("model", "prompt", "add_special_tokens", "return_token_strs")
_OF_TOKENIZE_CHAT = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("add_special_tokens", "return_token_strs"),
)


@dataclass(frozen=True)
class Limits:
    """What the endpoint takes.

    Attributes:
        body_bytes: of a body.
        waiting: requests beyond those that are computed in one step; more are refused (429).
        body_seconds: within which a body must have come, and an event of a stream must have been taken.
        seconds: of an answer; None: as long as it takes.
    """

    body_bytes: int = 32 << 20
    waiting: int = 1024
    body_seconds: float = 60.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Raises `ValidationError` for a limit that is none."""
        check_integer("max_waiting", self.waiting, 0)
        check_integer("max_body_bytes", self.body_bytes, 1)
        if self.seconds is not None and not (is_real(self.seconds) and 0 < self.seconds < math.inf):
            refuse("timeout", self.seconds, "None or seconds above 0")


@dataclass(frozen=True)
class Sites:
    """The sites whose pages a browser lets read answers (CORS); without origins none.

    Attributes:
        origins, methods, headers: names, or "*" for all.
        credentials: pages may send cookies.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


class Refused(Exception):
    """A request ends with this status and one sentence."""

    def __init__(self, status: int, message: str, code: str, parameter: str | None = None, retry: int = 0) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter, self.retry = status, code, parameter, retry

    def body(self) -> JsonObject:
        """As OpenAI writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}

    def response(self) -> Response:
        return _json(self.body(), self.status, {"Retry-After": str(self.retry)} if self.retry else None)


# ASCII, so that half a surrogate pair in a text can be sent.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


def _refusal(error: BaseException) -> Refused:
    """The body of an exception: the request's own mistake, or that the engine failed."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, MissingPackageError):
        return Refused(501, str(error), error_code(error))
    if isinstance(error, EngineClosedError):
        return Refused(503, str(error), "engine_closed", retry=1)
    if isinstance(error, PromptTooLongError):  # what to do is said as a body can do it
        what, code = str(error).partition("; ")[0], "context_length_exceeded"
        return Refused(400, f"{what}; shorten it, or send truncate_prompt_tokens, which keeps a part.", code, "prompt")
    if isinstance(error, ValidationError | SamplingError):
        return Refused(400, str(error), error_code(error), getattr(error, "parameter", None))
    if not isinstance(error, LLMError):
        logger.error("a request failed", exc_info=error)
    return Refused(500, str(error) or type(error).__name__, "server_error")


@contextmanager
def _of_body() -> Iterator[None]:
    """A body can hold anything: what nothing expected of it is its error."""
    try:
        yield
    except LLMError:
        raise
    except Exception as error:
        raise row_error(error) from error


@dataclass
class Endpoint:
    """The application over an engine.

    Attributes:
        names: of the model, the first in answers that name none.
        modules: adapters, which are models by their names.
        tool_parser: as `LLM.chat`'s.
        chat_template_kwargs: those of requests that do not say otherwise.
        tells_usage: streams that do not ask for it have it too.
        log_requests: bodies are logged, which have the prompts.
        num_running: requests in progress, those that wait included.
    """

    engine: AsyncLLM
    names: tuple[str, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    tool_parser: str = "auto"
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    tells_usage: bool = False
    sites: Sites = Sites()
    log_requests: bool = False
    num_running: int = 0

    def __post_init__(self) -> None:
        llm = self.engine.llm
        self._plan, self._config = llm._pooling, llm.config
        self._adapters = JobAdapters.of(self.modules, None, self.names)
        default = llm.get_default_sampling_params()
        # A reply may be as long as there is room for, a completion has 16 tokens, as in OpenAI's API and vLLM's.
        chats = dataclasses.replace(default, max_tokens=None) if default.max_tokens == 16 else default
        self._rows = {
            url: BatchRows(params=params, adapters=self._adapters)
            for url, params in zip(URLS, (chats, default), strict=True)
        }
        self._started = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application; the engine is shut down when it ends."""
        posts: dict[str, Callable[[JsonObject, str], Awaitable[object]]] = {
            URLS[0]: self._chat,
            URLS[1]: self._completions,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            **{url: self._pool for task in ("embed", "classify") for url in POOLING_URLS[task]},
            **dict.fromkeys(POOLING_URLS["score"], self._score),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), self._rerank),
        }
        gets: dict[str, Callable[[], Awaitable[Response]]] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
        }
        routes = [Route(url, partial(self._answer, work, url), methods=["POST"]) for url, work in posts.items()]
        routes += [Route(url, partial(_got, get), methods=["GET"]) for url, get in gets.items()]
        routes.append(Route("/v1/models/{name:path}", self._model_named, methods=["GET"]))

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.engine.shutdown)

        handlers = {HTTPException: _not_found, Exception: _failed}
        app = Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), self)  # type: ignore[arg-type]
        if not self.sites.origins:
            return app
        of, credentials = self.sites, self.sites.credentials
        return CORSMiddleware(app, of.origins, of.methods, of.headers, allow_credentials=credentials)

    # What every request goes through.

    async def _answer(
        self, work: Callable[[JsonObject, str], Awaitable[object]], url: str, request: Request
    ) -> Response:
        """Read a body, answer it, and stop where the client goes away or the time is over."""
        end = None if self.limits.seconds is None else time.monotonic() + self.limits.seconds
        try:
            body = await self._body(request)
            if self.log_requests:
                logger.info("%s %s", url, json.dumps(body))
            self._check_model(body)
            admission = self._admit(_num_requests(body))
            with admission as held:
                answer = await _while_there(work(body, url), request.receive, end)
                if answer is None:
                    return Response(status_code=_CLIENT_GONE)
                if isinstance(answer, _Begun):
                    held.keep()
                    return EventStream(answer, held, end, self.limits.body_seconds)
                return _json(answer)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            return _refusal(error).response()

    async def _body(self, request: Request) -> JsonObject:
        """The object of a body, without members that are null, which ask for nothing."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # others may be sent by any page that a browser shows
            raise Refused(415, "the content type must be application/json.", "unsupported_media_type")
        most, size, parts = self.limits.body_bytes, 0, []
        try:
            with _timeout(self.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refused(413, f"the body must have at most {most} bytes.", "body_too_large")
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not come within {self.limits.body_seconds:g} seconds."
            raise Refused(408, message, "timeout") from None
        return _object(b"".join(parts))

    def _check_model(self, body: JsonObject) -> None:
        name = body.get("model")
        if name is not None and name not in (known := (*self.names, *self.modules)):
            listed = ", ".join(map(repr, known))
            raise Refused(404, f"model must be one of {listed}, got {show(name)}.", "model_not_found", "model")

    def _admit(self, count: int) -> Admission:
        most = self._config.scheduler_config.max_num_seqs + self.limits.waiting
        if count > most:
            raise Refused(400, f"a body may ask for {most} answers at most, got {count}.", "too_many_answers")
        if self.num_running + count > most:
            raise Refused(429, f"{self.num_running} requests are running or waiting; try again.", "busy", retry=1)
        return Admission(self, count)

    # Models that generate.

    def _request(self, body: JsonObject, url: str) -> RowRequest:
        if self._plan is not None:
            raise Refused(404, "this model gives vectors or classes, and does not generate.", "not_found")
        with _of_body():
            return self._rows[url].request({"custom_id": "-", "url": url, "body": body})

    async def _chat(self, body: JsonObject, url: str) -> object:
        streams = _Streaming.of(body, self.tells_usage)
        priority, tools = _priority(body), body.get("tools")
        request, key = self._request(body, url), uuid.uuid4().hex
        check_conversation(request.messages)
        options = ChatOptions(
            None,
            request.chat["add_generation_prompt"],
            request.chat["continue_final_message"],
            tools,
            self._template_kwargs(request.chat),
            None,
            self.tool_parser,
            body.get("tool_choice"),
            body.get("parallel_tool_calls", True),
            request.chat.get("mm_processor_kwargs"),
        )
        prompt = ChatPrompt(request.messages, options)
        choice, model = request.choice or ToolChoice(), self._model(body)
        outputs = self._outputs(prompt, request, f"chatcmpl-{key[:24]}", priority, streams is not None)
        outputs = _numbered(outputs, _first_call(request.messages))
        if streams is not None:
            chunks = ChatChunks(f"chatcmpl-{key[:24]}", model, streams, choice, request.params.logprobs)
            return await _Begun.of(chunks.of(outputs))
        output = await _last(outputs)
        return _now(chat_body(output, key, model, choice, request.params.logprobs))

    def _template_kwargs(self, given: JsonObject) -> JsonObject | None:
        own = given.get("chat_template_kwargs")
        if not self.chat_template_kwargs or not isinstance(own, Mapping | None):
            return own  # no object: refused later
        return {**self.chat_template_kwargs, **(own or {})}

    async def _completions(self, body: JsonObject, url: str) -> object:
        streams = _Streaming.of(body, self.tells_usage)
        echo, priority = body.pop("echo", False), _priority(body)
        check_flag("echo", echo)
        only_prompt = echo and body.get("max_tokens") == 0 and body["max_tokens"] is not False
        if only_prompt:
            body["max_tokens"] = 1
        requests = [self._request({**body, "prompt": prompt}, url) for prompt in _prompts(body)]
        key, model = uuid.uuid4().hex, self._model(body)
        rows = []
        for place, request in enumerate(requests):
            if echo:
                request = request._replace(params=_scoring(request.params))
            prompt = _salted(request.prompt, body.get("cache_salt"))
            rows.append(self._outputs(prompt, request, f"cmpl-{key[:24]}-{place}", priority, streams is not None))
        echoed = Echo(self.engine, only_prompt) if echo else None
        if streams is not None:
            chunks = TextChunks(f"cmpl-{key[:24]}", model, streams, requests[0].params.n, echoed)
            return await _Begun.of(chunks.of(rows))
        outputs = await _together([_last(own) for own in rows])
        bodies = [completion_body(output, key, model) for output in outputs]
        if echoed is not None:
            for found, output in zip(bodies, outputs, strict=True):
                await echoed.add(found, output)
        return _now(_joined(bodies))

    async def _outputs(
        self, prompt: object, request: RowRequest, name: str, priority: int, streams: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        kind = RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY
        params = dataclasses.replace(request.params, output_kind=kind)
        outputs = self.engine.generate(prompt, params, name, lora_request=request.adapter, priority=priority)
        with _of_body():
            async with aclosing(outputs):
                async for output in outputs:
                    if output.error is not None:
                        raise output.error
                    yield output

    def _model(self, body: JsonObject) -> str:
        return body.get("model") or self.names[0]

    # Models that pool.

    def _vectors(self) -> BatchVectors:
        if self._plan is None:
            message = "this model generates text; serve it with --runner pooling, or another one, for vectors."
            raise Refused(404, message, "not_found")
        return BatchVectors(params=PoolingParams(), plan=self._plan, adapters=self._adapters)

    async def _pool(self, body: JsonObject, url: str) -> object:
        rows, task = self._vectors(), task_of(url)
        if "messages" in body:
            check_conversation(body["messages"])
            body = {**body, "chat_template_kwargs": self._template_kwargs(body) or {}}
        with _of_body():
            wanted = rows.request({"custom_id": "-", "url": url, "body": body})
        values, counts = await self._pooled(wanted, task)
        coded = body.get("encoding_format") == "base64"
        return _now(rows.response(task, values, uuid.uuid4().hex, self._model(body), sum(counts), coded))

    async def _score(self, body: JsonObject, url: str) -> object:
        rows = self._vectors()
        check_fields(body, (*_SCORE_FIELDS, *_NO_EFFECT), _NEUTRAL)
        names = (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2"))
        first, second = next((own for own in names if own[0] in body), names[-1])
        scores, count = await self._scores(body, body.get(first), body.get(second))
        return _now(rows.response("score", scores[:, None], uuid.uuid4().hex, self._model(body), count))

    async def _rerank(self, body: JsonObject, url: str) -> object:
        self._vectors()
        check_fields(body, (*_RERANK_FIELDS, *_NO_EFFECT), _NEUTRAL)
        query, documents, top = body.get("query"), body.get("documents"), body.get("top_n", 0)
        if not _is_scored(query):
            raise ValidationError("query must be a text, or {'content': parts}.", parameter="query")
        documents = [documents] if is_content(documents) else documents
        if not isinstance(documents, list) or not documents or not all(map(_is_scored, documents)):
            right = "a list of texts or of {'content': parts}, at least one"
            raise ValidationError(f"documents must be {right}.", parameter="documents")
        check_integer("top_n", top, 0)
        scores, count = await self._scores(body, query, documents)
        best = sorted(range(len(documents)), key=lambda index: -float(scores[index]))
        results = [
            {"index": index, "document": _document(documents[index]), "relevance_score": float(scores[index])}
            for index in best[: top or None]
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"id": f"rerank-{uuid.uuid4().hex[:24]}", "model": self._model(body), "usage": usage, "results": results}

    async def _scores(self, body: JsonObject, first: object, second: object) -> tuple[np.ndarray, int]:
        """float64 [pairs] and the number of tokens, as `LLM.score` computes them."""
        pairs, adapter = pair_prompts(first, second), self._adapters.named(body.get("model"), "model")
        names = ("dimensions", "truncate_prompt_tokens", "use_activation")
        params = PoolingParams(**{name: body[name] for name in names if name in body})
        if self._plan is not None and self._plan.task == "embed":
            own = dataclasses.replace(params, use_activation=True)
            items = {scored_key(item): item for pair in pairs for item in pair}
            wanted = [Wanted(ScoredText(item), own, None, adapter) for item in items.values()]
            values, counts = await self._pooled(wanted, "embed")
            vectors = {key: value.astype(np.float64) for key, value in zip(items, values, strict=True)}
            cosines = [np.add.reduce(vectors[scored_key(one)] * vectors[scored_key(other)]) for one, other in pairs]
            return np.array(cosines), sum(counts)
        wanted = [Wanted(one, params, other, adapter) for one, other in pairs]
        values, counts = await self._pooled(wanted, "classify")
        return np.array([value[0] for value in values], np.float64), sum(counts)

    async def _pooled(self, wanted: Sequence[Wanted], task: str) -> tuple[list[np.ndarray], list[int]]:
        """(float32 [size], number of tokens) of each."""

        async def one(own: Wanted) -> tuple[np.ndarray, int]:
            prompt = own.prompt if own.second is None else PairPrompt(cast("Scored", own.prompt), own.second)
            params = dataclasses.replace(own.params, task="classify" if task == "score" else task)
            with _of_body():
                async for output in self.engine.encode(prompt, params, lora_request=own.adapter):
                    return output.outputs.data.numpy(), len(output.prompt_token_ids)
            raise LLMError("the request was dropped.")

        found = await _together([one(own) for own in wanted])
        return [values for values, _ in found], [count for _, count in found]

    # The rest.

    async def _tokenize(self, body: JsonObject, url: str) -> object:
        is_chat = "messages" in body
        check_fields(body, _OF_TOKENIZE_CHAT if is_chat else _OF_TOKENIZE, {})
        names = body.pop("return_token_strs", False)
        check_flag("return_token_strs", names)
        with _of_body():
            tokens = await asyncio.to_thread(self._tokens_of_chat if is_chat else self._tokens_of_text, body)
        found = await asyncio.to_thread(self._token_names, tokens) if names else None
        most = self._config.model_config.max_model_len
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": found}

    def _tokens_of_text(self, body: JsonObject) -> list[int]:
        if not isinstance(body.get("prompt"), str):
            raise ValidationError("prompt must be a text.", parameter="prompt")
        llm = self.engine.llm
        kwargs = {"add_special_tokens": body.get("add_special_tokens", True)}
        parsed = [parse_prompt(body["prompt"])]
        tokenization = Tokenization.of(kwargs, self._config.model_config.max_model_len)
        return llm._preprocessor.tokenize(parsed, tokenization)[0][1]

    def _tokens_of_chat(self, body: JsonObject) -> list[int]:
        check_conversation(body["messages"])
        names = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
        kwargs = {"add_special_tokens": body.get("add_special_tokens", False)}
        given = {**body, "chat_template_kwargs": self._template_kwargs(body)}
        [prompt] = self.engine.llm.render_chat(
            body["messages"], tokenization_kwargs=kwargs, **{name: given[name] for name in names if name in given}
        )
        return prompt["prompt_token_ids"]

    def _token_names(self, tokens: list[int]) -> list[str]:
        return self.engine.llm.get_tokenizer().convert_ids_to_tokens(tokens)

    async def _detokenize(self, body: JsonObject, url: str) -> object:
        check_fields(body, ("model", "tokens"), {})
        tokens, vocabulary = body.get("tokens"), self._config.model_config.vocab_size
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            message = f"tokens must be a list of token ids from 0 to {vocabulary - 1}."
            raise ValidationError(message, parameter="tokens")
        return {"prompt": await asyncio.to_thread(self._text, tokens)}

    def _text(self, tokens: list[int]) -> str:
        return self.engine.llm.get_tokenizer().decode(tokens)

    async def _models(self) -> Response:
        return _json({"object": "list", "data": [self._about(name) for name in (*self.names, *self.modules)]})

    async def _model_named(self, request: Request) -> Response:
        try:
            name = request.path_params["name"]
            self._check_model({"model": name})
            return _json(self._about(name))
        except Refused as refused:
            return refused.response()

    def _about(self, name: str) -> JsonObject:
        """A model, or an adapter as one."""
        most = self._config.model_config.max_model_len
        about = {"object": "model", "created": self._started, "owned_by": "offline-llm", "max_model_len": most}
        if name in self.modules:
            return {"id": name, **about, "root": self.modules[name], "parent": self.names[0]}
        return {"id": name, **about, "root": str(self._config.model_config.model), "parent": None}

    async def _health(self) -> Response:
        try:
            await self.engine.check_health()
        except LLMError as error:
            return Refused(503, str(error), "engine_closed").response()
        return Response()

    async def _metrics(self) -> Response:
        text = metrics_text(self.engine.llm.get_metrics(), self.names[0])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self) -> Response:
        return _json({"version": __version__})


def _is_scored(given: object) -> bool:
    return isinstance(given, str) or is_content(given)


def _document(given: object) -> JsonObject:
    """As vLLM's answers have it."""
    return {"multi_modal": given["content"]} if is_content(given) else {"text": given}


async def _got(get: Callable[[], Awaitable[Response]], request: Request) -> Response:
    try:
        return await get()
    except Exception as error:
        return _refusal(error).response()


async def _not_found(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow")
    path = show(request.url.path)
    message = f"there is no {path} here; docs/howto/serve.md lists what there is."
    if allowed is not None:
        message = f"{path} must be asked by {allowed}, got {show(request.method)}."
    response = Refused(error.status_code, message, "not_found").response()
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return _refusal(error).response()


class Guard:
    """Lets requests in that have a key, where there are keys, and name a host that is meant."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app = app
        self._hosts = endpoint.hosts
        self._keys = [key.encode() for key in endpoint.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        await (self._app if refused is None else refused.response())(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        # A page of another site may have a name that leads here; a browser sends that name.
        if self._hosts is not None and _host(headers.get("host", "")).lower() not in self._hosts:
            return Refused(421, f"the host must be one of {', '.join(sorted(self._hosts))}.", "wrong_host")
        kind, _, given = headers.get("authorization", "").partition(" ")
        is_known = any(hmac.compare_digest(given.strip().encode(), key) for key in self._keys)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._keys and path != "/health" and not (kind.lower() == "bearer" and is_known):
            return Refused(401, "the API key is missing or wrong; send Authorization: Bearer KEY.", "invalid_api_key")
        return None


def _host(header: str) -> str:
    return header.partition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]


class Admission:
    """The room of one body's answers among those that run or wait. Left at the end of `with`, unless it is kept."""

    def __init__(self, endpoint: Endpoint, count: int) -> None:
        self._endpoint, self._count, self._is_kept = endpoint, count, False
        endpoint.num_running += count

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_kept:
            self.leave()

    def keep(self) -> None:
        """Until `leave`."""
        self._is_kept = True

    def leave(self) -> None:
        self._endpoint.num_running -= self._count
        self._count = 0


async def _while_there(work: Awaitable[T], receive: Receive, end: float | None) -> T | None:
    """The result of `work`; it is cancelled when the client goes away (None), or raises `Refused` at the time `end`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        timeout = None if end is None else max(0.0, end - time.monotonic())
        await asyncio.wait((task, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            return None
        raise Refused(408, "the answer took longer than the endpoint allows.", "timeout")
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Patience:
    """`with` it, a task waits so many seconds at most, or `TimeoutError` is raised. Its waits share one timer, which
    `close` ends.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop, self._task = seconds, asyncio.get_running_loop(), asyncio.current_task()
        self._since: float | None = None  # None: it does not wait
        self._is_late = False
        self._timer = self._loop.call_later(seconds, self._check)

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._since = None
        if self._is_late and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left = self._seconds if self._since is None else self._since + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif self._task is not None:
            self._is_late = True
            self._task.cancel()


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """`asyncio.timeout`, which Python 3.10 lacks."""
    patience = Patience(seconds)
    try:
        with patience:
            yield
    finally:
        patience.close()


async def _together(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results in order; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(own) for own in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async with aclosing(outputs):
        async for output in outputs:
            if output.finished:
                return output
    raise LLMError("the request was dropped.")


def _object(data: bytes) -> JsonObject:
    """The object in a body, without members that are null."""

    def no_json(name: str) -> object:
        raise ValueError(f"{name} is no JSON")

    _check_size(data)
    try:
        found = json.loads(data.decode("utf-8"), parse_constant=no_json)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, f"the body must be JSON: {reason[:200]}.", "invalid_json") from None
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, got {show(found)}.", "invalid_json")
    return {name: value for name, value in found.items() if value is not None}


def _check_size(data: bytes) -> None:
    """Raises `Refused` for JSON of so many values that reading it would keep others waiting."""
    if _num_objects(data) <= _MOST_OBJECTS and data.count(b",") <= _MOST_VALUES:
        return
    bare = _STRING.sub(b"", data)
    for count, most, what in (
        (_num_objects(bare), _MOST_OBJECTS, "arrays, objects and members"),
        (bare.count(b","), _MOST_VALUES, "values"),
    ):
        if count > most:
            raise Refused(400, f"the body must have at most {most} {what}, got {count}.", "body_too_large")


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def _num_objects(data: bytes) -> int:
    return sum(map(data.count, (b"[", b"{", b":")))


def _num_requests(body: JsonObject) -> int:
    """How many answers a body asks for; a wrong one is refused later."""
    several = next((body[name] for name in ("prompt", "input", "documents", "text_2") if name in body), None)
    count = len(several) if isinstance(several, list) and several and not isinstance(several[0], int) else 1
    each = body.get("n", 1)
    return count * (each if type(each) is int and each > 0 else 1)


def _prompts(body: JsonObject) -> list[object]:
    """The prompts of a body: a text, token ids, or a list of one or the other."""
    given = body.get("prompt")
    if isinstance(given, list) and given and not any(isinstance(item, int) for item in given):
        return list(given)
    if given is None:
        raise ValidationError("body has no prompt.", parameter="prompt")
    return [given]


def _priority(body: JsonObject) -> int:
    given = body.pop("priority", 0)
    if type(given) is not int:
        raise ValidationError(f"priority must be an integer, got {show(given)}.", parameter="priority")
    return given


def _salted(prompt: object, salt: object) -> object:
    if salt is None:
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _first_call(messages: object) -> int:
    """The number of the first call in an answer to a conversation: no id may be there twice."""
    calls = [call for message in _mappings(messages) for call in _mappings(message.get("tool_calls"))]
    own = [_OWN_ID.fullmatch(str(call.get("id"))) for call in calls]
    return 1 + max((int(found[1]) for found in own if found is not None), default=-1)


def _mappings(given: object) -> list[Mapping[str, object]]:
    return [item for item in given if isinstance(item, Mapping)] if isinstance(given, list) else []


async def _numbered(outputs: AsyncGenerator[RequestOutput, None], first: int) -> AsyncGenerator[RequestOutput, None]:
    """With the ids of calls counted from `first`."""
    async with aclosing(outputs):
        async for output in outputs:
            for own in output.outputs:
                own.tool_calls = [
                    dataclasses.replace(call, id=f"call{number:05d}")
                    for number, call in enumerate(own.tool_calls or (), first)
                ]
            yield output


def _now(body: JsonObject) -> JsonObject:
    return {**body, "created": int(time.time())}


def _joined(bodies: Sequence[JsonObject]) -> JsonObject:
    """Bodies of one prompt each as the body of all."""
    choices = [choice for body in bodies for choice in body["choices"]]
    usage = {name: sum(body["usage"][name] for body in bodies) for name in bodies[0]["usage"]}
    return {**bodies[0], "choices": [{**own, "index": index} for index, own in enumerate(choices)], "usage": usage}


def _scoring(params: SamplingParams) -> SamplingParams:
    """With the logprobs of the prompt too, as many as of the answer."""
    return dataclasses.replace(params, prompt_logprobs=params.logprobs)


@dataclass(frozen=True)
class Echo:
    """A completion that begins with its prompt.

    Attributes:
        only_prompt: `max_tokens` is 0: the token that was generated all the same is left out.
    """

    engine: AsyncLLM
    only_prompt: bool

    async def add(self, body: JsonObject, output: RequestOutput) -> None:
        """Put the prompt before each choice of `body`."""
        text, scored = await asyncio.to_thread(self.before, output)
        for choice in body["choices"]:
            if self.only_prompt:
                choice |= {"text": "", "finish_reason": "length"}
            found = choice["logprobs"]
            choice["text"] = text + choice["text"]
            if found is not None and scored is not None:
                own = {name: [] for name in found} if self.only_prompt else found
                joined = {name: scored[name] + own[name] for name in own}
                joined["text_offset"] = scored["text_offset"] + [len(text) + place for place in own["text_offset"]]
                choice["logprobs"] = joined
        if self.only_prompt:
            usage = body["usage"]
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}

    def before(self, output: RequestOutput) -> tuple[str, JsonObject | None]:
        """The prompt's text, and its logprobs in the form of a completion's; the first token has none."""
        ids = output.prompt_token_ids or []
        tokenizer = self.engine.llm.get_tokenizer()
        text = output.prompt if output.prompt is not None else tokenizer.decode(ids, skip_special_tokens=True)
        positions = output.prompt_logprobs
        if positions is None:
            return text, None
        first = tokenizer.decode(ids[:1])
        own = [None if each is None else each[token] for each, token in zip(positions, ids, strict=True)]
        names = [first if item is None else item.decoded_token or "" for item in own]
        return text, {
            "tokens": names,
            "token_logprobs": [None if item is None else finite(item.logprob) for item in own],
            "top_logprobs": [
                None if each is None else {item.decoded_token or "": finite(item.logprob) for item in each.values()}
                for each in positions
            ],
            "text_offset": text_offsets(text, names),
        }


# Streams.


@dataclass(frozen=True)
class _Streaming:
    """What `stream_options` say."""

    usage: bool = False
    always_usage: bool = False

    @classmethod
    def of(cls, body: JsonObject, tells_usage: bool) -> _Streaming | None:
        """Takes `stream` and `stream_options` out of the body; None: it asks for no stream."""
        streams, options = body.pop("stream", False), body.pop("stream_options", None)
        check_flag("stream", streams)
        if options is None:
            return cls(tells_usage) if streams else None
        if not streams:
            raise ValidationError(
                "stream_options must be left out where stream is not true.", parameter="stream_options"
            )
        names = ("include_usage", "continuous_usage_stats", "include_obfuscation")
        if not isinstance(options, dict) or any(name not in names for name in options):
            raise ValidationError(
                f"stream_options must be an object with {' or '.join(names[:2])}.", parameter="stream_options"
            )
        given = [options.get(name) or False for name in names[:2]]
        for name, value in zip(names, given, strict=False):
            check_flag(f"stream_options.{name}", value)
        return cls(given[0] or tells_usage, given[1])


# What is sent together: the events of one output. `None` after the last one: the stream ends.
Events = AsyncGenerator[list[JsonObject | None], None]


@dataclass
class _Begun:
    """A stream whose first events are there: its request was not refused."""

    first: list[JsonObject | None]
    rest: Events

    @classmethod
    async def of(cls, events: Events) -> _Begun:
        try:
            return cls(await anext(events), events)
        except BaseException:
            await events.aclose()
            raise


class EventStream(Response):
    """Server-sent events, as OpenAI sends them. The request ends where its client goes away, or takes none for so many
    `seconds`.
    """

    def __init__(self, begun: _Begun, admission: Admission, end: float | None, seconds: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._begun, self._admission, self._end, self._seconds = begun, admission, end, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await _while_there(self._send(send), receive, self._end)
            except Refused as refused:
                with _timeout(self._seconds):
                    await send(_part([refused.body(), None]))
        except OSError:  # the client has gone, or (TimeoutError) takes nothing
            pass
        finally:
            try:
                await self._begun.rest.aclose()
            finally:
                self._admission.leave()

    async def _send(self, send: Send) -> None:
        """Raises `TimeoutError` where the client does not take what there is."""
        patience = Patience(self._seconds)
        try:
            async with aclosing(self._events()) as events:
                async for together in events:
                    with patience:
                        await send(_part(together))
        finally:
            patience.close()

    async def _events(self) -> Events:
        """All of them; an error is the last."""
        yield self._begun.first
        try:
            async for together in self._begun.rest:
                yield together
        except Exception as error:
            yield [_refusal(error).body(), None]


def _part(together: Sequence[JsonObject | None]) -> Message:
    """A part of the response's body."""
    lines = ["data: [DONE]" if event is None else f"data: {_encode(event)}" for event in together]
    data = "\n\n".join([*lines, ""]).encode()
    return {"type": "http.response.body", "body": data, "more_body": together[-1] is not None}


async def _merged(rows: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several requests as they come, with the number of the request."""
    if len(rows) == 1:
        async with aclosing(rows[0]):
            async for output in rows[0]:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def run(place: int, own: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(own):
                async for output in own:
                    queue.put_nowait((place, output))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(run(place, own)) for place, own in enumerate(rows)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Chunks:
    """The events of a body.

    Attributes:
        kind: of object.
        counts: prompt tokens and generated ones, of each request.
    """

    key: str
    model: str
    streams: _Streaming
    kind: str = ""
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def event(self, choices: list[JsonObject]) -> JsonObject:
        body = {"id": self.key, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}
        if self.streams.always_usage:
            return {**body, "usage": self.usage()}
        return {**body, "usage": None} if self.streams.usage else body

    def count(self, place: int, output: RequestOutput) -> None:
        generated = sum(len(own.token_ids) for own in output.outputs)
        self.counts[place] = len(output.prompt_token_ids or ()), generated

    def usage(self) -> JsonObject:
        prompt, generated = (sum(pair[side] for pair in self.counts.values()) for side in (0, 1))
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def last(self) -> list[JsonObject | None]:
        return [{**self.event([]), "usage": self.usage()}, None] if self.streams.usage else [None]


@dataclass
class _Sent:
    """What was sent of a choice: characters of reasoning and content, tokens with logprobs, the arguments of
    each call.
    """

    reasoning: int = 0
    content: int = 0
    tokens: int = 0
    calls: list[str] = field(default_factory=list)


class ChatChunks(Chunks):
    """Of a chat: the role, what is new of `reasoning`, `content` and `tool_calls`, the reason of the end."""

    def __init__(self, key: str, model: str, streams: _Streaming, choice: ToolChoice, num_logprobs: int | None) -> None:
        super().__init__(key, model, streams, "chat.completion.chunk")
        self._choice, self._num_logprobs = choice, num_logprobs

    async def of(self, outputs: AsyncGenerator[RequestOutput, None]) -> Events:
        sent: dict[int, _Sent] = {}
        ended: set[int] = set()
        async with aclosing(outputs):
            async for output in outputs:
                self.count(0, output)
                together: list[JsonObject | None] = []
                choices = []
                for own in output.outputs:
                    if own.index in ended:
                        continue
                    if own.index not in sent:
                        sent[own.index] = _Sent()
                        together.append(self.event([_choice_of(own.index, {"role": "assistant", "content": ""})]))
                    is_last = own.finish_reason is not None
                    before = sent[own.index]
                    delta = _new(own, before, is_last)
                    if not delta and not is_last:
                        continue
                    scored = None
                    if own.logprobs is not None:
                        part = dataclasses.replace(own, logprobs=own.logprobs[before.tokens :])
                        scored, before.tokens = chat_logprobs(part, self._num_logprobs), len(own.logprobs)
                    reason = finish_of_chat(own, self._choice) if is_last else None
                    choices.append(_choice_of(own.index, delta, scored, reason))
                    if is_last:
                        ended.add(own.index)
                together += [*([self.event(choices)] if choices else []), *(self.last() if output.finished else [])]
                if together:
                    yield together


def _choice_of(
    index: int, delta: JsonObject, scored: JsonObject | None = None, reason: str | None = None
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": scored, "finish_reason": reason}


def _new(own: CompletionOutput, sent: _Sent, is_last: bool) -> JsonObject:
    """The delta of a choice, which is counted in `sent`."""
    delta: JsonObject = {}
    reasoning, content = own.reasoning or "", own.text if own.content is None else own.content
    if len(reasoning) > sent.reasoning:
        delta["reasoning"], sent.reasoning = reasoning[sent.reasoning :], len(reasoning)
    if len(content) > sent.content:
        delta["content"], sent.content = content[sent.content :], len(content)
    pieces = []
    calls = own.tool_calls or []
    for place, call in enumerate(calls):
        is_open = not is_last and place == len(calls) - 1
        before = sent.calls[place] if place < len(sent.calls) else ""
        text = certain_arguments(call.arguments) if is_open else before + rest_of(before, call.arguments)
        if place == len(sent.calls):
            whole = call.to_dict()
            pieces.append({"index": place, **whole, "function": {**whole["function"], "arguments": text}})
            sent.calls.append(text)
        elif len(text) > len(before) and text.startswith(before):
            pieces.append({"index": place, "function": {"arguments": text[len(before) :]}})
            sent.calls[place] = text
    return {**delta, "tool_calls": pieces} if pieces else delta


class TextChunks(Chunks):
    """Of completions: what is new of each text."""

    def __init__(self, key: str, model: str, streams: _Streaming, n: int, echo: Echo | None) -> None:
        super().__init__(key, model, streams, "text_completion")
        self._n, self._echo = n, echo

    async def of(self, rows: Sequence[AsyncGenerator[RequestOutput, None]]) -> Events:
        sent: dict[int, tuple[int, int]] = {}  # characters and tokens of each choice
        ended: set[int] = set()
        left = len(rows)
        async with aclosing(_merged(rows)) as outputs:  # type: ignore[type-var]
            async for place, output in outputs:
                self.count(place, output)
                left -= output.finished
                choices = []
                for own in output.outputs:
                    index = place * self._n + own.index
                    is_last = own.finish_reason is not None
                    if index in ended:
                        continue
                    characters, tokens = sent.get(index, (0, 0))
                    if index in sent and len(own.text) == characters and not is_last:
                        continue
                    whole = completion_choice(own)
                    found = whole["logprobs"]
                    ready = tokens
                    if found is not None:
                        ready = len(found["tokens"]) if is_last else max(tokens, _told_tokens(own.text, found))
                        found = {name: values[tokens:ready] for name, values in found.items()}
                    choice = {**whole, "index": index, "text": own.text[characters:], "logprobs": found}
                    if index not in sent and self._echo is not None:
                        await self._echo.add({"choices": [choice], "usage": {"prompt_tokens": 0}}, output)
                    sent[index] = len(own.text), ready
                    choices.append(choice)
                    if is_last:
                        ended.add(index)
                together = [*([self.event(choices)] if choices else []), *([] if left else self.last())]
                if together:
                    yield together


def _told_tokens(text: str, scored: JsonObject) -> int:
    """How many tokens, up to the last one that is in the text: what follows may yet be a part of a stop string."""
    places = list(enumerate(zip(scored["tokens"], scored["text_offset"], strict=True), 1))
    return next((count for count, (token, at) in reversed(places) if token and text.startswith(token, at)), 0)


def metrics_text(metrics: Sequence[Metric], model: str) -> str:
    """Metrics as Prometheus reads them, of a model of this name."""
    lines, seen = [], set()
    for given in metrics:
        metric = dataclasses.replace(given, labels={**given.labels, "model_name": model})
        kind = type(metric).__name__.lower()
        name = f"{metric.name}_total" if isinstance(metric, Counter) else metric.name
        if name not in seen:
            seen.add(name)
            lines.append(f"# TYPE {name} {kind}")
        if isinstance(metric, Histogram):
            lines += [f"{name}_bucket{_labels(metric, le=le)} {count}" for le, count in metric.buckets.items()]
            lines += [f"{name}_sum{_labels(metric)} {metric.sum}", f"{name}_count{_labels(metric)} {metric.count}"]
        else:
            lines.append(f"{name}{_labels(metric)} {metric.value}")  # type: ignore[attr-defined]
    return "\n".join(lines) + "\n"


def _labels(metric: Metric, **more: str) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in {**metric.labels, **more}.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
