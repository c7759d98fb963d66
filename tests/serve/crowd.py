"""200 clients at once for a minute, some of whom leave or lie: every answer is the library's, bit for bit, and no row
or memory stays. `python tests/serve/crowd.py`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

import httpx  # noqa: E402
from bodies import CHAT, anything, body  # noqa: E402
from embedded import assert_idle, engine_of, open_llm, run  # noqa: E402

import llm as package  # noqa: E402
from llm import LLM, RequestOutput, SamplingParams  # noqa: E402

PATHS = ("/v1/completions", "/v1/chat/completions")
# What a process may have gained between the middle and the end: the allocator's, and garbage that waits.
ROOM = 24 << 20


class Asked(NamedTuple):
    path: str
    body: dict[str, Any]
    texts: list[str]
    scores: list[list[float]]


def questions(llm: LLM, draw: random.Random, count: int) -> list[Asked]:
    """Requests of all kinds, with the library's answers."""
    found = []
    for number in range(count):
        sampling: dict[str, Any] = {
            "temperature": draw.choice([0, 0.7, 1.3]),
            "seed": draw.randrange(1 << 30),
            "max_tokens": draw.randrange(1, 25),
            "n": draw.choice([1, 1, 1, 2, 3]),
            "stop": draw.choice([[], ["the"], [",", "LORD"]]),
            "top_p": draw.choice([1.0, 0.9]),
            "ignore_eos": draw.random() < 0.3,
        }
        if draw.random() < 0.2:
            sampling |= {"structured_outputs": {"choice": ["heaven", f"earth {number}"]}, "ignore_eos": False}
        params = SamplingParams(**{**sampling, "logprobs": 1, "structured_outputs": None})
        if "structured_outputs" in sampling:
            choice = package.sampling_params.StructuredOutputsParams(choice=sampling["structured_outputs"]["choice"])
            params = SamplingParams(**{**sampling, "logprobs": 1, "structured_outputs": choice})
            sampling["max_tokens"] = params.max_tokens = 25
        text = " ".join(draw.choices("and the king of Israel said unto him".split(), k=draw.randrange(1, 20)))
        if draw.random() < 0.5:
            own = {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 1, **sampling}
            (output,) = llm.chat(own["messages"], params, use_tqdm=False)
        else:
            own = {"prompt": text, "logprobs": 1, **sampling}
            (output,) = run(llm, [text], params)
        found.append(Asked(PATHS["messages" in own], own, *answer(output)))
    return found


def answer(output: RequestOutput) -> tuple[list[str], list[list[float]]]:
    texts = [own.text for own in output.outputs]
    return texts, [[next(iter(at.values())).logprob for at in own.logprobs or ()] for own in output.outputs]


def told(path: str, events: list[dict[str, Any]]) -> tuple[list[str], list[list[float]]]:
    """As `answer`, of a body or of a stream's events."""
    texts: dict[int, str] = {}
    scores: dict[int, list[float]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        index, said = choice["index"], choice.get("delta", choice.get("message"))
        texts[index] = texts.get(index, "") + ((said.get("content") or "") if said is not None else choice["text"])
        own = scores.setdefault(index, [])
        if choice["logprobs"] is not None:
            chat = choice["logprobs"].get("content")
            own += [at["logprob"] for at in chat] if chat is not None else choice["logprobs"]["token_logprobs"]
    return [texts[index] for index in sorted(texts)], [scores[index] for index in sorted(scores)]


async def client(url: str, asked: list[Asked], draw: random.Random, ends: float, seen: Counter[str]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300, verify=False) as own:
        while time.monotonic() < ends:
            kind, one = draw.random(), draw.choice(asked)
            if kind < 0.35:
                response = await own.post(one.path, json=one.body)
                assert response.status_code == 200, response.text
                check(one, [response.json()], seen)
            elif kind < 0.65:
                async with own.stream("POST", one.path, json={**one.body, "stream": True}) as response:
                    lines = [line[6:] async for line in response.aiter_lines() if line]
                assert lines[-1] == "[DONE]", lines
                check(one, [json.loads(line) for line in lines[:-1]], seen)
            elif kind < 0.8:
                await leave(own, one, draw)
                seen["left"] += 1
            elif kind < 0.92:
                plain = CHAT if "chat" in one.path else {"prompt": "And", "max_tokens": 2}
                sent = body(draw, plain) if draw.random() < 0.8 else anything(draw, plain)
                data = json.dumps(sent).encode()
                response = await own.post(one.path, content=data, headers={"Content-Type": "application/json"})
                assert response.status_code in (200, 400, 404), (sent, response.text)
                seen[f"status {response.status_code}"] += 1
            else:
                await lie(url, draw)
                seen["lied"] += 1


def check(one: Asked, events: list[dict[str, Any]], seen: Counter[str]) -> None:
    assert told(one.path, events) == (one.texts, one.scores), (one, events)
    seen["equal"] += 1


async def leave(own: httpx.AsyncClient, one: Asked, draw: random.Random) -> None:
    """Before the answer, or in the middle of a stream."""
    sent = {**one.body, "max_tokens": 60, "stream": draw.random() < 0.5}
    with contextlib.suppress(TimeoutError, httpx.TimeoutException):
        async with own.stream("POST", one.path, json=sent, timeout=draw.uniform(0.02, 1)) as response:
            async for _ in response.aiter_lines():
                break


async def lie(url: str, draw: random.Random) -> None:
    """Bytes that are no request, or a part of one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    long = head + b"Content-Length: 4000\r\n\r\n"
    writer.write(draw.choice([draw.randbytes(200), head[:-20], long + b'{"prompt', head + b"X: " + b"a" * 90_000]))
    with contextlib.suppress(OSError):
        await writer.drain()
        if draw.random() < 0.5:
            await asyncio.wait_for(reader.read(64), 0.2)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def resident() -> int:
    gc.collect()
    return next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )


async def crowd(url: str, asked: list[Asked], clients: int, seconds: float, seen: Counter[str]) -> list[int]:
    """Memory after each tenth of the time."""
    ends, sizes = time.monotonic() + seconds, []
    tasks = [asyncio.ensure_future(client(url, asked, random.Random(i), ends, seen)) for i in range(clients)]
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        sizes.append(resident())
    await asyncio.gather(*tasks)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    with open_llm(max_model_len=128, max_num_seqs=32) as llm:
        asked = questions(llm, random.Random(1), 60)
        with package.serve(llm, port=0) as url:
            sizes = asyncio.run(crowd(url, asked, options.clients, options.seconds, seen))
            ends = time.monotonic() + 30
            while engine_of(llm).scheduler.has_unfinished() and time.monotonic() < ends:
                time.sleep(0.05)
            assert httpx.get(f"{url}/health").status_code == 200
        assert_idle(llm)
    print(dict(seen), "MiB:", [size >> 20 for size in sizes])
    assert seen["equal"] > options.clients and seen["left"] and seen["lied"]
    assert sizes[-1] - sizes[len(sizes) // 2] < ROOM, "memory grows"


if __name__ == "__main__":
    main()
