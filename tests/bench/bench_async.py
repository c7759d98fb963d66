"""What asyncio costs: gathered requests on `AsyncLLM` beside one call of `LLM.generate` with the same prompts.

    python tests/bench/bench_async.py [--shape qwen2.5-0.5b] [--rows 32] [--tokens 64] [--rounds 7]

Prints the median seconds of both, taken in turn, for each `output_kind`, and exits with 1 if gathered requests take
more than 1.1 times as long, or answer anything else. Text that is told token by token is decoded token by token, which
`generate` does not do.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from llm import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from llm.llm import EMBEDDED_MODEL
from llm.tools.bench.workloads import write_config

LIMIT = 1.1


async def gathered(engine: AsyncLLM, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    async def answer(prompt: str) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(prompt, params):
            new = output.outputs[0].token_ids
            tokens = tokens + new if params.output_kind is RequestOutputKind.DELTA else new
        return tokens

    return await asyncio.gather(*map(answer, prompts))


def open_model(shape: str | None, folder: Path) -> LLM:
    """A shape gets the embedded model's tokenizer, whose ids are below its vocabulary."""
    if shape is None:
        return LLM(enable_prefix_caching=False)
    write_config(shape, "bfloat16", folder)
    return LLM(folder, tokenizer=EMBEDDED_MODEL, load_format="dummy", max_model_len=256, enable_prefix_caching=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", help="a published shape with random weights; default: the embedded model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    prompts = [f"In the year {year} of the reign of" for year in range(given.rows)]
    worst = 0.0
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        llm = stack.enter_context(open_model(given.shape, Path(name)))
        engine = stack.enter_context(AsyncLLM(llm))
        for kind in RequestOutputKind:
            params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, output_kind=kind)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(given.rounds):
                started = perf_counter()
                expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
                middle = perf_counter()
                found = asyncio.run(gathered(engine, prompts, params))
                times[0].append(middle - started)
                times[1].append(perf_counter() - middle)
                if found != expected:
                    print("the answers differ")
                    return 1
            one, many = map(statistics.median, times)
            worst = max(worst, many / one)
            print(f"{kind.name:<10}  generate {one:.3f} s  gathered {many:.3f} s  ratio {many / one:.3f}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
