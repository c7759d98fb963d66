"""The endpoint: what OpenAI's own client gets is what `LLM` answers, bit for bit, and what is wrong is told by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bodies import CHAT, anything, body
from checkpoints.adapters import write_adapter
from documented_processors import DummyLogitsProcessor
from embedded import assert_idle, copy_model, engine_of, open_llm, run
from pydantic import BaseModel
from same_answers import same_values
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

import llm as package
from llm import LLM, AsyncLLM, SamplingParams, ValidationError
from llm.cli import main
from llm.inputs import LoRARequest
from llm.outputs import Counter, Gauge, Histogram
from llm.tools.serve import uvicorn_server
from llm.tools.serve.app import Endpoint, Limits, Refused, Sites, _object, metrics_text

PROMPT = "In the beginning"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
ASK: list[Any] = [{"role": "user", "content": "Who was the king?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Jericho", "Ai"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PARAMS = SamplingParams(temperature=0, max_tokens=12)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_model(tmp_path_factory.mktemp("model") / "float")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return write_adapter(model, tmp_path_factory.mktemp("adapter") / "odd", seed=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=256, max_num_seqs=8, enable_lora=True, logits_processors=[DummyLogitsProcessor]) as own:
        yield own
        assert_idle(own)


@pytest.fixture(scope="module")
def url(llm: LLM, adapter: Path) -> Iterator[str]:
    with package.serve(llm, port=0, lora_modules={"odd": adapter}) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


@contextlib.contextmanager
def opened(llm: LLM, **more: Any) -> Iterator[TestClient]:
    """The application without a port."""
    endpoint = Endpoint(AsyncLLM(llm), **{"names": ("tiny",), **more})
    with TestClient(endpoint.app(), base_url="http://localhost", raise_server_exceptions=False) as found:
        yield found
    assert endpoint.num_running == 0


@pytest.fixture(scope="module")
def inside(llm: LLM) -> Iterator[TestClient]:
    with opened(llm) as found:
        yield found


def error_of(response: httpx.Response) -> str:
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"} and found["message"][-1] in ".?"
    return found["message"]


def chat(llm: LLM, params: SamplingParams, **more: Any) -> Any:
    return llm.chat(ASK, params, use_tqdm=False, **more)[0]


def test_a_completion_is_the_librarys(client: openai.OpenAI, llm: LLM) -> None:
    found = client.completions.create(prompt=[PROMPT, "And"], n=2, logprobs=2, seed=5, **{**GREEDY, "temperature": 0.9})
    params = SamplingParams(n=2, logprobs=2, seed=5, temperature=0.9, max_tokens=12, top_p=0.9)
    expected = [own for output in run(llm, [PROMPT, "And"], params) for own in output.outputs]
    assert [choice.text for choice in found.choices] == [own.text for own in expected]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3] and len({own.text for own in expected}) > 2
    for choice, own in zip(found.choices, expected, strict=True):
        assert choice.logprobs is not None and own.logprobs is not None
        assert choice.logprobs.token_logprobs == [next(iter(each.values())).logprob for each in own.logprobs]
    assert found.usage is not None and found.usage.completion_tokens == sum(len(own.token_ids) for own in expected)
    (ids,) = (output.prompt_token_ids for output in run(llm, [PROMPT], params))
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == greedy(llm)


def greedy(llm: LLM, **more: Any) -> str:
    return llm.generate(PROMPT, PARAMS, use_tqdm=False, **more)[0].outputs[0].text


def test_a_stream_is_the_whole(client: openai.OpenAI, llm: LLM) -> None:
    given = {
        **GREEDY,
        "temperature": 0.9,
        "seed": 3,
        "prompt": [PROMPT, "And"],
        "n": 2,
        "logprobs": 1,
        "stop": ["LORD"],
    }
    whole = client.completions.create(**given)
    texts, scores, offsets, reasons = ([[] for _ in range(4)] for _ in range(4))  # type: ignore[var-annotated]
    usage = None
    for event in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index].append(choice.text)
            scores[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert usage == whole.usage
    for choice in whole.choices:
        assert "".join(texts[choice.index]) == choice.text and reasons[choice.index] == [choice.finish_reason]
        assert choice.logprobs is not None and scores[choice.index] == choice.logprobs.token_logprobs
        assert offsets[choice.index] == choice.logprobs.text_offset
    assert max(len(own) for own in texts) > 1  # a client that is slow gets several tokens in a piece


def test_a_chat_is_the_librarys(client: openai.OpenAI, llm: LLM) -> None:
    expected = chat(llm, SamplingParams(temperature=0, max_tokens=20, logprobs=2))
    given: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_completion_tokens": 20}
    found = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    (choice,), own = found.choices, expected.outputs[0]
    assert (choice.message.content, choice.finish_reason) == (own.text, own.finish_reason)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [each.logprob for each in choice.logprobs.content] == [
        next(iter(at.values())).logprob for at in own.logprobs
    ]
    events = list(client.chat.completions.create(**given, logprobs=True, top_logprobs=2, stream=True))
    deltas = [event.choices[0] for event in events]
    assert deltas[0].delta.role == "assistant" and "".join(each.delta.content or "" for each in deltas) == own.text
    assert [
        score for each in deltas if each.logprobs for score in each.logprobs.content or []
    ] == choice.logprobs.content
    assert deltas[-1].finish_reason == own.finish_reason
    assert len(deltas) > 2, "the role, the first token and the end are told at once, the rest as time allows"
    long = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, extra_body={"ignore_eos": True})
    assert long.usage is not None and long.usage.total_tokens == 256, "as long as there is room for"


def test_answers_are_parsed_and_functions_called(client: openai.OpenAI, llm: LLM) -> None:
    class King(BaseModel):
        name: str
        years: int

    parsed = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=King, temperature=0, max_tokens=80
    )
    assert isinstance(parsed.choices[0].message.parsed, King)
    given: Any = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "temperature": 0, "tool_choice": "required"}
    (call,) = client.chat.completions.create(**given).choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Jericho", "Ai")
    with client.chat.completions.stream(**given) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments and final.choices[0].finish_reason == "tool_calls"
    assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments and len(pieces) > 2


def test_an_asynchronous_client_streams_parses_and_calls(url: str, llm: LLM) -> None:
    class King(BaseModel):
        name: str
        years: int

    given: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 80}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # older clients stream no other

    async def ask() -> tuple[str, Any, Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as own:
            parts = await own.chat.completions.create(**given, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in parts])
            async with own.chat.completions.stream(**given, response_format=King) as stream:
                king = (await stream.get_final_completion()).choices[0].message.parsed
            async with own.chat.completions.stream(**given, tools=[strict], tool_choice="required") as stream:
                calls = (await stream.get_final_completion()).choices[0].message.tool_calls
            return text, king, calls

    text, king, calls = asyncio.run(ask())
    assert text == chat(llm, SamplingParams(temperature=0, max_tokens=80)).outputs[0].text
    assert isinstance(king, King)
    assert json.loads(calls[0].function.arguments)["city"] in ("Jericho", "Ai")


def test_the_ids_of_calls_are_no_others_of_the_conversation() -> None:
    """An agent that keeps a history pairs results with calls by these."""
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [{"role": "assistant", "content": "", "tool_calls": [{"id": "call00006", **call}, {"id": "x9", **call}]}]
    path, wanted = "/v1/chat/completions", {"tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    with open_llm(max_model_len=512, chat_template=template) as own, opened(own) as inside:
        for messages, expected in ((ASK, "call00000"), ([*ASK, *history, *ASK], "call00007")):
            sent = {**wanted, "messages": messages}
            found = inside.post(path, json=sent).json()
            assert found["choices"][0]["message"]["tool_calls"][0]["id"] == expected, found
            events = inside.post(path, json={**sent, "stream": True}).text
            assert events.count(f'"id":"{expected}"') == 1


def test_reasoning_is_streamed_apart_from_content() -> None:
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}{# </think> #}"
    reply = "<think>Was it Saul, or David?</think>David was the king."
    sent = {"messages": ASK, "structured_outputs": {"choice": [reply]}}
    with open_llm(max_model_len=256, chat_template=template) as own, opened(own) as inside:
        message = inside.post("/v1/chat/completions", json=sent).json()["choices"][0]["message"]
        events = inside.post("/v1/chat/completions", json={**sent, "stream": True}).text.split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    told = {name: [delta[name] for delta in deltas if delta.get(name)] for name in ("reasoning", "content")}
    assert message["reasoning"] == "Was it Saul, or David?" and message["content"] == "David was the king."
    assert all("".join(parts) == message[name] and len(parts) > 2 for name, parts in told.items()), told


def test_what_the_server_says_of_all_requests(llm: LLM) -> None:
    """Arguments of the chat template, and the usage of streams."""
    template = "{% for message in messages %}{{ message['content'] }} {{ mood }} {% endfor %}"
    sent: dict[str, Any] = {"messages": ASK, "max_tokens": 2}
    with (
        open_llm(max_model_len=64, chat_template=template) as own,
        opened(own, chat_template_kwargs={"mood": "indicative"}, tells_usage=True) as inside,
    ):

        def shown(more: dict[str, Any]) -> str:
            tokens = inside.post("/tokenize", json={"messages": ASK, **more}).json()["tokens"]
            used = inside.post("/v1/chat/completions", json={**sent, **more}).json()["usage"]
            assert used["prompt_tokens"] == len(tokens)
            return own.get_tokenizer().decode(tokens)

        assert "king? indicative" in shown({})
        assert "king? imperative" in shown({"chat_template_kwargs": {"mood": "imperative"}})
        events = inside.post("/v1/chat/completions", json={**sent, "stream": True}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == 2
    assert events[-2] == "data: [DONE]"


def test_pages_of_other_sites(llm: LLM, inside: TestClient) -> None:
    """CORS: refusals can be read too; without --allowed-origins no page may read anything."""
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization,content-type"}
    with opened(llm, sites=Sites(("http://a.example",)), api_keys=("k",)) as own:
        allowed = own.options("/v1/completions", headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://a.example"
        for key, status in (("k", 200), ("x", 401)):
            headers = {"Origin": "http://a.example", "Authorization": f"Bearer {key}"}
            found = own.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers=headers)
            assert found.status_code == status
            assert found.headers["access-control-allow-origin"] == "http://a.example"
        other = own.options("/v1/completions", headers={**asked, "Origin": "http://b.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    assert inside.options("/v1/completions", headers=asked).status_code == 405
    found = inside.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers=asked)
    assert "access-control-allow-origin" not in found.headers


def test_a_prompt_that_is_too_long_is_told_what_a_body_can_do(inside: TestClient) -> None:
    given = {"max_tokens": 2, "temperature": 0}
    for path, sent in (
        ("/v1/completions", {"prompt": "the " * 400}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the " * 400}]}),
    ):
        found = inside.post(path, json={**given, **sent})
        said = error_of(found)
        assert found.json()["error"]["code"] == "context_length_exceeded" and "on_too_long" not in said
        assert "max_model_len is 256" in said and "send truncate_prompt_tokens" in said
        cut = inside.post(path, json={**given, **sent, "truncate_prompt_tokens": -1})
        assert cut.status_code == 200 and cut.json()["usage"]["prompt_tokens"] == 254


def test_a_closed_engine_is_told(llm: LLM) -> None:
    endpoint = Endpoint(AsyncLLM(llm), ("tiny",))
    with TestClient(endpoint.app(), base_url="http://localhost") as own:
        endpoint.engine.shutdown()
        assert own.get("/health").status_code == 503
        found = own.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        assert (found.status_code, found.headers["retry-after"]) == (503, "1") and "is shut down" in error_of(found)


def test_a_completion_by_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"years": {"type": "integer"}}, "required": ["years"]}
    form = {"type": "json_schema", "json_schema": {"name": "king", "schema": {**schema, "additionalProperties": False}}}
    given: Any = {**GREEDY, "max_tokens": 40, "prompt": PROMPT}
    text = client.completions.create(**given, extra_body={"response_format": form}).choices[0].text
    assert json.loads(text).keys() == {"years"}
    both = {"response_format": form, "structured_outputs": {"choice": ["a"]}}
    with pytest.raises(openai.BadRequestError, match="structured_outputs must be left out where response_format"):
        client.completions.create(**given, extra_body=both)


def test_a_request_that_takes_long_to_read_keeps_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a huge schema: others are answered meanwhile, and who leaves is forgotten."""
    compiler, goes_on, has_begun = llm._preprocessor._structures, threading.Event(), threading.Event()
    compiled = compiler._compile

    def slowly(kind: str, value: Any) -> Any:
        has_begun.set()
        assert goes_on.wait(60)
        return compiled(kind, value)

    monkeypatch.setattr(compiler, "_compile", slowly)
    slow = {"prompt": PROMPT, "max_tokens": 8, "structured_outputs": {"choice": ["heaven", "and", "earth"]}}

    async def ask() -> list[httpx.Response]:
        endpoint = Endpoint(AsyncLLM(llm), ("tiny",))
        transport = httpx.ASGITransport(endpoint.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as own:
            first = asyncio.ensure_future(own.post("/v1/completions", json=slow))
            while not has_begun.is_set():
                await asyncio.sleep(0.01)
            second = asyncio.ensure_future(own.post("/v1/completions", json={**slow, "max_tokens": 9}))
            await asyncio.sleep(0.05)
            second.cancel()
            other = await own.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert not first.done() and other.status_code == 200
            goes_on.set()
            found = [await first, other]
        assert endpoint.num_running == 0
        endpoint.engine.shutdown()
        return found

    first, _ = asyncio.run(ask())
    assert first.json()["choices"][0]["text"] in ("heaven", "and", "earth")
    assert_idle(llm)


def test_many_clients_at_once(url: str, llm: LLM) -> None:
    expected = [output.outputs[0].text for output in run(llm, [f"{PROMPT} {i}" for i in range(24)], PARAMS)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as own:
            calls = [own.completions.create(prompt=f"{PROMPT} {i}", **GREEDY) for i in range(24)]
            return [found.choices[0].text for found in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == expected


def test_adapters_are_models(client: openai.OpenAI, llm: LLM, adapter: Path) -> None:
    assert [model.id for model in client.models.list()][0::2] == ["tiny", "odd"]
    found = client.completions.create(prompt=PROMPT, **{**GREEDY, "model": "odd"})
    expected = greedy(llm, lora_request=LoRARequest("odd", 1, str(adapter)))
    assert found.choices[0].text == expected != greedy(llm) and found.model == "odd"
    named = client.models.retrieve("odd")
    assert named in list(client.models.list()) and named.model_extra == {
        **{"root": str(adapter), "parent": "tiny", "max_model_len": 256},
    }
    with pytest.raises(openai.NotFoundError, match=r"got 'gpt/5'"):
        client.models.retrieve("gpt/5")
    with pytest.raises(openai.NotFoundError, match=r"model must be one of 'tiny'.*got 'gpt-5'"):
        client.completions.create(prompt=PROMPT, **{**GREEDY, "model": "gpt-5"})


def test_extra_arguments_reach_logits_processors(url: str, client: openai.OpenAI, tmp_path: Path, llm: LLM) -> None:
    """The document's `curl`, its client, and rows of a batch."""
    sent = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "vllm_xargs": {"target_token": 67}}
    line = ["curl", "-s", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(sent)]
    texts = [json.loads(subprocess.run(line, capture_output=True, check=True).stdout)["choices"][0]["text"]]
    for name in ("vllm_xargs", "extra_args"):
        own = client.completions.create(prompt=PROMPT, **GREEDY, extra_body={name: {"target_token": 67}})
        texts.append(own.choices[0].text[: len(texts[0])])
    rows = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": sent}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    llm.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    texts.append(json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"][0]["text"])
    assert set(texts) == {llm.get_tokenizer().decode([67]) * 4}
    with pytest.raises(openai.BadRequestError, match="target_token value x is not int"):
        client.completions.create(prompt=PROMPT, **GREEDY, extra_body={"vllm_xargs": {"target_token": "x"}})


def test_a_client_that_goes_away_frees_its_row(url: str, llm: LLM) -> None:
    """In the middle of a stream, and waiting for a whole answer."""
    endless = {"model": "tiny", "prompt": PROMPT, "max_tokens": 230, "ignore_eos": True, "n": 4, "temperature": 1}
    scheduler = engine_of(llm).scheduler
    for streams in (True, False):
        with (
            httpx.Client(timeout=0.5) as own,
            contextlib.suppress(httpx.TimeoutException),
            own.stream(
                "POST", f"{url}/v1/completions", json={**endless, "stream": streams, "max_tokens": 240}
            ) as response,
        ):
            next(response.iter_lines())
        ended = time.monotonic() + 20
        while scheduler.has_unfinished() and time.monotonic() < ended:
            time.sleep(0.01)
        assert not scheduler.has_unfinished()
    assert_idle(llm)


def test_an_echo_has_the_prompts_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    """As lm-evaluation-harness asks for them."""
    (scored,) = run(llm, PROMPT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    ids = scored.prompt_token_ids
    own = [at[token].logprob for at, token in zip(scored.prompt_logprobs[1:], ids[1:], strict=True)]
    for given, count in (({"max_tokens": 1}, 1), ({"max_tokens": 0}, 0)):
        found = client.completions.create(prompt=[ids, ids], echo=True, logprobs=1, **{**GREEDY, **given})
        for choice in found.choices:
            logprobs: Any = choice.logprobs
            assert logprobs.token_logprobs[0] is None and same_values(logprobs.token_logprobs[1 : len(ids)], own)
            assert len(logprobs.tokens) == len(ids) + count
            assert all(len(each) == len(logprobs.tokens) for each in (logprobs.top_logprobs, logprobs.text_offset))
            assert choice.text.startswith(PROMPT) and (len(choice.text) > len(PROMPT)) == bool(count)
    text = client.completions.create(prompt=PROMPT, echo=True, **GREEDY).choices[0].text
    assert text == PROMPT + greedy(llm)
    events = client.completions.create(prompt=PROMPT, echo=True, stream=True, **GREEDY)
    assert "".join(event.choices[0].text for event in events) == text


def test_texts_and_tokens(inside: TestClient, llm: LLM) -> None:
    ids = run(llm, PROMPT, PARAMS)[0].prompt_token_ids
    assert inside.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"] == ids
    plain = inside.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True})
    assert plain.json()["tokens"] == ids[1:] and len(plain.json()["token_strs"]) == plain.json()["count"]
    assert inside.post("/tokenize", json={"messages": ASK}).json()["tokens"] == chat(llm, PARAMS).prompt_token_ids
    assert inside.post("/detokenize", json={"tokens": ids[1:]}).json() == {"prompt": PROMPT}
    wrong = inside.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": 1})
    assert "return_token_strs must be True or False" in error_of(wrong)
    for sent in ({"tokens": [10**6]}, {"tokens": [True]}, {"tokens": "x"}, {}):
        assert "tokens must be a list of token ids" in error_of(inside.post("/detokenize", json=sent))


WRONG: list[tuple[Any, int, str]] = [
    ({"prompt": PROMPT, "temprature": 1}, 400, "no field 'temprature' here. Did you mean 'temperature'"),
    ({"prompt": PROMPT, "temperature": 9}, 400, "temperature must be"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [PROMPT, 5]}, 400, "prompt"),
    ({"prompt": "the " * 400}, 400, "max_model_len is 256"),
    ({"prompt": PROMPT, "n": 10**6}, 400, "may ask for 1032 answers at most"),
    ({"prompt": PROMPT, "model": ["tiny"]}, 404, "model must be one of 'tiny', got"),
    ({"prompt": PROMPT, "stream": "yes"}, 400, "stream must be True or False"),
    ({"prompt": PROMPT, "stream_options": {"include_usage": True}}, 400, "left out where stream is not true"),
    ({"prompt": PROMPT, "stream": True, "stream_options": {"x": 1}}, 400, "stream_options must be"),
    ({"prompt": PROMPT, "stream": True, "max_tokens": 0}, 400, "max_tokens must be"),
    ({"prompt": PROMPT, "echo": 1}, 400, "echo must be True or False"),
    ({"prompt": PROMPT, "priority": "high"}, 400, "priority must be"),
    ([], 400, "must be a JSON object"),
    (b"{", 400, "must be JSON"),
    (b'{"prompt": "\xff"}', 400, "must be JSON"),
    (b'{"prompt": NaN}', 400, "NaN is no JSON"),
    (b"[" * 60_000, 400, "nested too deep"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "must be JSON"),
    (b'{"a": "' + b"x" * 70_000 + b'"}', 413, "at most 65536 bytes"),
    (b'{"a": [' + b"[]," * 2**15 + b"0]}", 413, "at most 65536 bytes"),
]


@pytest.mark.parametrize(("sent", "status", "said"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_told(sent: Any, status: int, said: str, llm: LLM, client_of_limits: TestClient) -> None:
    data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    found = client_of_limits.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert found.status_code == status and said in error_of(found)


@pytest.fixture(scope="module")
def client_of_limits(llm: LLM) -> Iterator[TestClient]:
    with opened(llm, limits=Limits(body_bytes=1 << 16)) as found:
        yield found


def test_other_routes_and_kinds(inside: TestClient) -> None:
    assert inside.post("/v1/completions", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    wrong = inside.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST") and "asked by POST, got 'GET'" in error_of(
        wrong
    )
    assert "there is no '/docs' here" in error_of(inside.get("/docs"))
    for path in ("/v1/embeddings", "/rerank", "/score", "/v1/classify"):
        assert "this model generates text" in error_of(inside.post(path, json={"input": "x"}))
    assert inside.get("/health").status_code == 200 and inside.get("/version").json()["version"] == package.__version__
    lone = inside.post("/v1/completions", content=b'{"prompt": "\\ud83d", "max_tokens": 1}', headers=JSON)
    assert lone.status_code in (200, 400)


def test_only_who_has_a_key_and_means_this_host(llm: LLM) -> None:
    with opened(llm, api_keys=("one", "zwei")) as own:
        for given, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Basic one"}, 401),
        ):
            found = own.get("/v1/models", headers=given)
            assert found.status_code == status and "API key" in error_of(found)
        assert own.get("/v1/models", headers={"Authorization": "Bearer zwei"}).status_code == 200
        assert own.get("/health").status_code == 200 and own.get("/metrics").status_code == 401
    with opened(llm, hosts=frozenset({"localhost", "127.0.0.1", "::1"})) as own:
        assert own.get("/v1/models", headers={"Host": "evil.example:80"}).status_code == 421
        for host in ("localhost", "LocalHost:1", "127.0.0.1:8000", "[::1]:8000"):
            assert own.get("/v1/models", headers={"Host": host}).status_code == 200


def test_a_body_of_too_many_values_is_not_read() -> None:
    """Reading it would take seconds, in which nobody else is answered; texts may have any signs."""
    lists = b'{"prompt": [' + b"[1]," * 140_000 + b"[1]]}"
    for data, said in (
        (lists, "at most 131072 arrays, objects and members, got 140004"),
        (b'{"prompt": [' + b"1," * 2_200_000 + b"1]}", "at most 2097152 values, got 2200000"),
    ):
        with pytest.raises(Refused, match=said):
            _object(data)
    text = "[{,:\\" * 500_000
    assert _object(json.dumps({"prompt": text, "n": None}).encode()) == {"prompt": text}


def test_clients_that_do_not_send_or_take_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers, a body and events must come and be taken in time, however few bytes a client sends."""
    monkeypatch.setattr(uvicorn_server, "HEADER_SECONDS", 0.4)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with package.serve(llm, port=0) as url:
        port = int(url.rpartition(":")[2])
        for sent, more, expected in (
            (b"", b"", b""),
            (b"GET /health HTTP/1.1\r\nX: ", b"a", b""),
            (whole, whole[:9], b"HTTP/1.1 200"),  # the second request does not come
            (whole + b"GET /hea", b"l", b"HTTP/1.1 200"),
            (head + b"X: " + b"a" * 70_000, b"", b"HTTP/1.1 400"),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as own:
                started = time.monotonic()
                own.sendall(sent)
                found = b""
                with contextlib.suppress(ConnectionError):
                    if more:
                        time.sleep(0.2)
                        own.sendall(more)
                    while part := own.recv(4096):
                        found += part
                assert found[:12] in (expected, b"") and time.monotonic() - started < 10
        assert httpx.get(f"{url}/health").status_code == 200
    late = Limits(body_seconds=0.2)
    endpoint = Endpoint(AsyncLLM(llm), ("tiny",), limits=late)
    sent = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}

    async def stalls() -> tuple[httpx.Response, list[str]]:
        async def slowly() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

        transport = httpx.ASGITransport(endpoint.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as own:
            response = await own.post("/v1/completions", content=slowly(), headers=JSON)
        kinds: list[str] = []

        async def send(message: Any) -> None:  # takes the first event, and no other
            kinds.append(message["type"])
            if len(kinds) > 2:
                await asyncio.sleep(60)

        bodies = [{"type": "http.request", "body": json.dumps(sent).encode(), "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await asyncio.sleep(60)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await endpoint.app()(scope, receive, send)
        return response, kinds

    response, kinds = asyncio.run(asyncio.wait_for(stalls(), 20))
    assert response.status_code == 408 and "the body did not come within 0.2 seconds" in error_of(response)
    assert len(kinds) == 3 and endpoint.num_running == 0
    endpoint.engine.shutdown()
    assert_idle(llm)


def test_too_many_requests_are_told_to_come_back(llm: LLM) -> None:
    """And a request that takes too long ends."""
    endpoint = Endpoint(AsyncLLM(llm), ("tiny",), limits=Limits(waiting=0, seconds=0.15))
    sent = {"prompt": PROMPT, "max_tokens": 250, "min_tokens": 250, "n": 8}

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(endpoint.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as own:
            first = asyncio.ensure_future(own.post("/v1/completions", json=sent))
            await asyncio.sleep(0.05)
            return [await own.post("/v1/completions", json={**sent, "n": 1}), await first]

    busy, late = asyncio.run(ask())
    assert busy.status_code == 429 and busy.headers["retry-after"] == "1" and "try again" in error_of(busy)
    assert late.status_code == 408 and "took longer" in error_of(late) and endpoint.num_running == 0
    endpoint.engine.shutdown()
    assert_idle(llm)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_bodies_are_the_clients_mistakes(path: str, llm: LLM, inside: TestClient) -> None:
    """`python tests/serve/malformed.py` sends 2,000."""
    draw = random.Random(path)
    own = CHAT if "chat" in path else {"prompt": "And", "max_tokens": 2}
    statuses = [
        posted(inside, path, body(draw, own) if draw.random() < 0.8 else anything(draw, own)) for _ in range(150)
    ]
    assert {200, 400} <= set(statuses) <= {200, 400, 404}, set(statuses)


def posted(client: TestClient, path: str, sent: Any) -> int:
    found = client.post(path, content=json.dumps(sent).encode(), headers=JSON)
    if found.status_code >= 400:
        said = error_of(found)
        assert found.status_code < 500 and "this row raised" not in said, (sent, said)
    return found.status_code


def test_vectors_classes_and_scores(llm: LLM) -> None:
    with open_llm(runner="pooling", convert="embed", max_model_len=64) as own, opened(own) as client:
        api = openai.OpenAI(base_url="http://localhost/v1", api_key="x", http_client=client)
        for kind in ("float", "base64"):
            found = api.embeddings.create(model="tiny", input=["And", "the king"], encoding_format=kind)  # type: ignore[arg-type]
            vectors = own.embed(["And", "the king"], use_tqdm=False).to_numpy()
            if kind == "float":
                assert [item.embedding for item in found.data] == vectors.tolist()
        assert api.embeddings.create(model="tiny", input=[[5, 6], [7]]).usage.total_tokens == 3
        texts = ["a king", "the sea", "And"]
        scores = own.score("And", texts, use_tqdm=False).to_numpy(), own.rerank("And", texts, use_tqdm=False)
        sent = {"text_1": "And", "text_2": texts}
        assert [item["score"] for item in client.post("/score", json=sent).json()["data"]] == [
            output.outputs.score for output in own.score("And", texts, use_tqdm=False)
        ]
        ranked = client.post("/rerank", json={"query": "And", "documents": texts, "top_n": 2}).json()["results"]
        assert [(item["index"], item["relevance_score"]) for item in ranked] == [
            (item.index, item.relevance_score) for item in scores[1][:2]
        ]
        for path, wrong in (("/rerank", {"query": 5}), ("/rerank", {"query": "x", "documents": []}), ("/score", {})):
            assert client.post(path, json=wrong).status_code == 400
        assert "no field 'x'" in error_of(client.post("/v1/embeddings", json={"input": "a", "x": 1}))
        draw = random.Random(1)
        statuses = {posted(client, "/v1/embeddings", body(draw, {"input": ["And", "the"]})) for _ in range(60)}
        assert 400 in statuses <= {200, 400, 404}
        assert "does not generate" in error_of(client.post("/v1/completions", json={"prompt": "a"}))


def test_metrics_are_prometheus_text(inside: TestClient) -> None:
    inside.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    lines = inside.get("/metrics").text.splitlines()
    sample = re.compile(r'[a-z0-9_:]+(_bucket|_sum|_count|_total)?\{([a-z_]+="[^"]*",?)+\} [-+0-9.e]+(inf)?')
    assert all(line.startswith("# TYPE vllm:") or sample.fullmatch(line) for line in lines)
    generated = next(line for line in lines if line.startswith("vllm:generation_tokens_total{"))
    assert float(generated.rpartition(" ")[2]) >= 2
    own = {"model_name": "a folder"}
    text = metrics_text([Gauge("a", own, 1.5), Counter("b", {}, 2), Histogram("c", {}, 1, 2.0, {"+Inf": 1})], 'x"\\')
    assert 'a{model_name="x\\"\\\\"} 1.5\n' in text and "b_total{" in text and ',le="+Inf"} 1\n' in text
    assert all('model_name="tiny"' in line for line in lines if not line.startswith("#"))


def test_addresses_and_ports(llm: LLM, url: str) -> None:
    with (
        pytest.raises(ValidationError, match="host must be an address of this machine alone"),
        package.serve(llm, host="0.0.0.0"),
    ):
        pass
    port = int(url.rpartition(":")[2])
    with pytest.raises(ValidationError, match=f"127.0.0.1:{port} cannot be listened on"), package.serve(llm, port=port):
        pass
    with pytest.raises(ValidationError, match="with arguments of LLM"), package.serve(llm, port=0, max_num_seqs=3):
        pass
    before = threading.enumerate()
    with package.serve(llm, port=0, api_key="k", served_model_name=["a", "b"]) as own:
        found = httpx.get(f"{own}/v1/models", headers={"Authorization": "Bearer k"}).json()
        assert [item["id"] for item in found["data"]] == ["a", "b"]
    assert threading.enumerate() == before, "the server has ended with the block"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own}/health")
    for given, said in (
        ({"port": 70000}, "port must be an integer from 0 to 65535"),
        ({"host": None}, "host must be a text"),
        ({"api_key": ""}, "api_key must have letters"),
        ({"api_key": ["a", "\u00e9"]}, "api_key must have letters"),
        ({"timeout": float("nan")}, "timeout must be None or seconds above 0"),
        ({"timeout": 0}, "timeout must be None or seconds above 0"),
        ({"max_waiting": -1}, "max_waiting must be an integer of at least 0"),
    ):
        with pytest.raises(ValidationError, match=said), package.serve(llm, **given):
            pass
    assert greedy(llm)


def test_options_of_the_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's, with several values; the port is taken, so that none starts."""
    port = url.rpartition(":")[2]
    taken = "cannot be listened on"
    for line, said in (
        ("org/model --api-key a b --served_model_name c d", taken),
        ("--api_key a --api-key b --model org/model", taken),
        ("--disable-log-requests --uvicorn-log-level info --response-role assistant --enable_auto_tool_choice", taken),
        ("--no-enable-log-requests --enable-flash-late-interaction --fingerprint-mode none -asc 1", taken),
        ("--trust-remote-code org/model --allowed-origins http://a.example --ssl-cert-reqs 0", taken),
        ("--middleware a.b", "--middleware 'a.b' is refused: no code is loaded"),
        ("--enable-ssl-refresh", "--enable-ssl-refresh is refused: start the server again"),
        ("--no-enable-ssl-refresh --api-server-count 2", "--api-server-count '2' is refused: one process serves"),
        ("--ssl-keyfile a", "--ssl-keyfile must be left out without --ssl-certfile, got 'a'"),
        ("--ssl-certfile /no/such", "--ssl-certfile '/no/such' cannot be used with its key (No such file"),
        ("--uds /no/such/socket", "--uds '/no/such/socket' cannot be listened on (No such file"),
        ("--api-key a org/model", "--api-key has several values, of which the last may be the model"),
        ("org/model --model org/other", "--model must be left out"),
        ("--root-path model", "root_path must be a path such as /model, got 'model'"),
        ("--shutdown-timeout -1", "shutdown_timeout must be an integer of at least 0"),
        ("--timeout nan", "timeout must be"),
        ("--host 0.0.0.0", "host must be an address of this machine alone"),
        ("--host 0.0.0.0 --insecure --max-waiting -1", "max_waiting must be"),
    ):
        assert main(["serve", "--port", port, *line.split()]) == 1
        assert said in capsys.readouterr().err, line
    for line in (["--default-chat-template-kwargs", "[1]"], ["--allowed-origins", "["], ["--allowed-origins", "[1]"]):
        with pytest.raises(SystemExit):
            main(["serve", *line])
        assert "it must be a" in capsys.readouterr().err


def test_a_root_path_is_left_out_of_paths(llm: LLM) -> None:
    endpoint = Endpoint(AsyncLLM(llm), ("tiny",), api_keys=("k",))
    with TestClient(endpoint.app(), base_url="http://localhost", root_path="/x") as own:
        assert own.get("/x/health").status_code == 200 and own.get("/x/v1/models").status_code == 401
        assert own.get("/x/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def options_of(transport: str, folder: Path) -> list[str]:
    """How the command listens: HTTPS, with a certificate of 127.0.0.1, or a Unix socket."""
    if transport == "uds":
        return ["--uds", str(folder / "socket")]
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        "-days",
        "2",
    ]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    return ["--ssl-keyfile", key, "--ssl-certfile", certificate]


@pytest.mark.parametrize(("times", "transport"), [(1, "https"), (2, "uds")])
def test_the_command_finishes_what_runs_when_it_is_told_to_end(times: int, transport: str, tmp_path: Path) -> None:
    """Told twice, it ends at once. It listens on a port with TLS, and on a Unix socket."""
    if transport == "https" and shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    options = options_of(transport, tmp_path)
    command = [sys.executable, "-m", "llm", "serve", "--port", "0", "--max-model-len", "512", "--max_num_seqs", "4"]
    server = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = server.stderr.readline()
        found = re.search(r"tiny is served at (https://127.0.0.1:\d+/v1|the socket .*/socket); Ctrl-C ends", said)
        assert found is not None, said
        sent = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        sent |= {"max_tokens": 500, "n": 32} if times > 1 else {}  # it is not done when it is told twice
        rest: list[str] = []
        if transport == "https":
            verify = ssl.create_default_context(cafile=options[-1])
            client = httpx.Client(base_url=found[1], verify=verify, timeout=60)
        else:
            client = httpx.Client(base_url="http://localhost/v1", transport=httpx.HTTPTransport(uds=options[-1]))
        with (
            client,
            contextlib.suppress(httpx.RemoteProtocolError),
            client.stream("POST", "/completions", json=sent, timeout=60) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            for _ in range(times):
                server.send_signal(signal.SIGTERM if times == 1 else signal.SIGINT)
                time.sleep(0.2)  # signals of one kind that come together are one
            rest += [line for line in lines if line]
        assert (rest[-1:] == ["data: [DONE]"] and '"finish_reason":"length"' in rest[-2]) == (times == 1)
        assert server.wait(60) == 0 and server.stderr.read() == "ended\n"
        assert not (tmp_path / "socket").exists()
    finally:
        server.kill()
        server.wait()
