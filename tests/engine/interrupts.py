"""Is an engine sound after Ctrl-C, whenever it comes? Sends SIGINT to this process at random moments of calls.

    PYTHONPATH=.:tests python tests/engine/interrupts.py                 # 1,000 interrupts, some minutes on one core
    PYTHONPATH=.:tests python tests/engine/interrupts.py --count 50 --seed 3

The calls are of `generate`, `generate_iter` and `stream`, with n > 1, a grammar, logprobs and speculation. What was
interrupted must be a beginning of what an uninterrupted call gives, of `generate` no row may be missing, and the engine
must be idle afterwards, with every block of its KV cache free. After every tenth interrupt, and at the end, a whole
call must give the same answers.

Exits 1 if something differs.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from embedded import assert_idle

from llm import LLM, GenerationInterrupted, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"old": {"type": "boolean"}},
    "required": ["old"],
    "additionalProperties": False,
}
KINDS = [
    SamplingParams(max_tokens=24, ignore_eos=True, seed=1),
    SamplingParams(max_tokens=12, n=3, seed=2),
    SamplingParams(max_tokens=16, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(max_tokens=9, logprobs=2, seed=4),
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
]
PROMPTS = [f"In the year {index} of the king, in the year" for index in range(10)]
PARAMS = [KINDS[index % len(KINDS)] for index in range(len(PROMPTS))]


# By index of the prompt, the tokens of each completion.
Found = dict[int, list[list[int]]]


def tokens(outputs: Any) -> Found:
    return {output.index: [list(own.token_ids) for own in output.outputs] for output in outputs}


def generate(llm: LLM) -> Found:
    return tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def iterate(llm: LLM) -> Found:
    return tokens(llm.generate_iter(PROMPTS, KINDS[1]))


def stream(llm: LLM) -> Found:
    list(llm.stream(PROMPTS[0], KINDS[4]))
    return {}


def problem(call: Callable[[LLM], Found], llm: LLM, whole: Found, delay: float) -> tuple[bool, str]:
    """Interrupt a call after `delay` seconds: (whether it was interrupted, what is wrong)."""
    found: Found | None = None
    was_interrupted = True
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        call(llm)
        signal.setitimer(signal.ITIMER_REAL, 0)
        was_interrupted = False
    except GenerationInterrupted as caught:
        found = tokens(caught.outputs)
    except KeyboardInterrupt:
        pass  # before the engine began, or after it had ended: Python's own
    try:
        assert_idle(llm)
    except AssertionError as error:
        return was_interrupted, f"the engine is not idle: {error}"
    if found is None or call is stream:
        return was_interrupted, ""
    if call is generate and found.keys() != whole.keys():
        return was_interrupted, f"{len(whole) - len(found)} rows are missing"
    for index, ours in found.items():
        if any(own != full[: len(own)] for own, full in zip(ours, whole[index], strict=False)):
            return was_interrupted, f"row {index} is no beginning of its answer"
    return was_interrupted, ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    random_, count, problems = random.Random(given.seed), 0, 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    with LLM(max_model_len=96, max_num_seqs=4, num_threads=1) as llm:
        calls: list[tuple[Callable[[LLM], Found], Found, float]] = []
        for call in (generate, iterate, stream):
            call(llm)
            started = time.monotonic()
            calls.append((call, call(llm), time.monotonic() - started))
        while count < given.count:
            call, whole, seconds = random_.choice(calls)
            was_interrupted, wrong = problem(call, llm, whole, max(1e-4, random_.random() * seconds))
            count += was_interrupted
            if not wrong and was_interrupted and count % 10 == 0:
                wrong = "" if generate(llm) == calls[0][1] else "a whole call gives other answers"
            if wrong:
                problems += 1
                print(f"interrupt {count} of {call.__name__}: {wrong}", flush=True)
        problems += any(call(llm) != whole for call, whole, _ in calls)
    print(f"{count} interrupts: {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
