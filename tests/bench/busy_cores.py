"""What other programs on the cores cost a call: busy loops pinned to cores, the embedded model and the 0.5B shape.

`python tests/bench/busy_cores.py [embedded | qwen2.5-0.5b] [rounds] [busy cores, all if left out]`. Each round times
calls without and then with the busy loops, ours and `transformers.generate` in turn, and prints both ratios of the
medians. A thread's fair share of a busy core is half of it: a ratio of 2 with all cores busy, of 1.33 with one of two.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from llm import LLM, SamplingParams
from llm.llm import EMBEDDED_MODEL
from llm.loading.resolve import resolve_folder
from llm.tools.bench import workloads as shapes

CALLS = 7
# name -> (rows, new tokens of each)
WORKLOADS = {"embedded": (16, 64), "qwen2.5-0.5b": (4, 24)}


@contextmanager
def busy_cores(cores: list[int]) -> Iterator[None]:
    loop = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop, str(core)]) for core in cores]
    time.sleep(0.5)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        time.sleep(0.5)


def models(name: str, folder: Path) -> tuple[LLM, Any]:
    """Ours and transformers', which has random weights where ours has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "embedded":
        return LLM(), AutoModelForCausalLM.from_pretrained(resolve_folder(EMBEDDED_MODEL, None), dtype=torch.float32)
    shapes.write_config(name, "bfloat16", folder)
    ours = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, speculative_config=None)
    return ours, AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def calls(name: str, llm: LLM, theirs: Any) -> dict[str, Callable[[int], object]]:
    rows, tokens = WORKLOADS[name]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def prompts(start: int) -> list[list[int]]:
        return [[(start + 7 * row + 3 * place) % 500 + 10 for place in range(16)] for row in range(rows)]

    def generate(start: int) -> object:
        ids = torch.tensor(prompts(start))
        lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        with torch.inference_mode():
            return theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)

    return {"ours": lambda start: llm.generate(prompts(start), params, use_tqdm=False), "transformers": generate}


def median_seconds(call: Callable[[int], object]) -> float:
    times = []
    for start in range(CALLS):
        begun = time.perf_counter()
        call(start)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main(name: str = "embedded", rounds: str = "3", busy: str | None = None) -> None:
    cores = sorted(os.sched_getaffinity(0), reverse=True)[: int(busy) if busy else None]
    with ExitStack() as stack:
        llm, theirs = models(name, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        timed = calls(name, stack.enter_context(llm), theirs)
        for call in timed.values():
            call(0)
        for _ in range(int(rounds)):
            idle = {who: median_seconds(call) for who, call in timed.items()}
            with busy_cores(cores):
                loaded = {who: median_seconds(call) for who, call in timed.items()}
            print(", ".join(f"{who} {idle[who]:.3f} s idle, {loaded[who] / idle[who]:.2f}x busy" for who in timed))


if __name__ == "__main__":
    main(*sys.argv[1:])
