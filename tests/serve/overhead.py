"""What HTTP costs over `AsyncLLM`, with 32 clients. `python tests/serve/overhead.py`

Both in turn, each in a process of its own; of the server's, its CPU time is compared too, for the clients of a real one
run elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from llm import LLM, AsyncLLM, SamplingParams  # noqa: E402

PROMPTS = [f"And the {number}. king said unto" for number in range(32)]
TOKENS = 160
ARGUMENTS = {"max_model_len": 256, "max_num_seqs": 32, "num_threads": 1, "speculative_config": None}
Times = tuple[float, float]  # seconds, and seconds of CPU time of the process that computes


async def inside(engine: AsyncLLM) -> Times:
    async def one(prompt: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        async for _ in engine.generate(prompt, params):
            pass

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, PROMPTS))
    return time.perf_counter() - started, time.process_time() - cpu


async def outside(url: str, pid: int, streams: bool) -> Times:
    """The clients write bytes and read to the end: a client library takes longer than the server."""
    port = int(url.rpartition(":")[2])

    async def one(prompt: str) -> None:
        sent = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": streams}
        body = json.dumps(sent).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        found = await reader.read()
        assert found.startswith(b"HTTP/1.1 200") and (b"data: [DONE]" in found) == streams
        writer.close()

    started, cpu = time.perf_counter(), cpu_of(pid)
    await asyncio.gather(*map(one, PROMPTS))
    return time.perf_counter() - started, cpu_of(pid) - cpu


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    model = [] if options.model is None else [options.model]
    given = [text for name, value in ARGUMENTS.items() for text in (f"--{name}", json.dumps(value))]
    command = [sys.executable, "-m", "llm", "serve", *model, "--port", "0", *given]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"(http://[\d.:]+)/v1; Ctrl-C ends", line)))
        with LLM(*model, **ARGUMENTS) as llm, AsyncLLM(llm) as engine:
            asyncio.run(rounds(engine, url, server.pid, options.rounds))
    finally:
        server.terminate()
        server.wait()


async def rounds(engine: AsyncLLM, url: str, pid: int, count: int) -> None:
    found: dict[str, list[Times]] = {"AsyncLLM": [], "bodies": [], "streams": []}
    for turn in range(count + 1):
        times = {
            "AsyncLLM": await inside(engine),
            "bodies": await outside(url, pid, False),
            "streams": await outside(url, pid, True),
        }
        if turn:  # the first warms up
            for name, own in times.items():
                found[name].append(own)
    for name, own in found.items():
        of_wall, of_cpu = (
            statistics.median(a[side] / b[side] for a, b in zip(own, found["AsyncLLM"], strict=True)) for side in (0, 1)
        )
        print(f"{name}: {of_wall:.2f} of AsyncLLM's time, {of_cpu:.2f} of its CPU time (medians of {count} pairs)")


if __name__ == "__main__":
    main()
