"""Two replicas or ranks of one thread against one process of two threads, in turn; and what one costs beside none.

    PYTHONPATH=.:tests python tests/replicas/speed.py                       # the embedded model, workload w2
    PYTHONPATH=.:tests python tests/replicas/speed.py --shape qwen2.5-0.5b --workload w1 --only threads ranks

Prints output tokens a second and the time of one, the median of `--rounds`; and the processor time of the program
itself for each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

from llm import LLM, SamplingParams
from llm.tools.bench.session import building_shape
from llm.tools.bench.workloads import BenchOptions, find_recipe, make_workload

SETTINGS: dict[str, dict[str, Any]] = {
    "one process, two threads": {"num_threads": 2},
    "two replicas, one thread each": {"data_parallel_size": 2, "num_threads": 1},
    "one process, one thread": {"num_threads": 1},
    "one replica, one thread": {"devices": [{0}], "num_threads": 1},
    "two ranks, one thread each": {"tensor_parallel_size": 2, "num_threads": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape")
    parser.add_argument("--workload", default="w2")
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose names have one of these words")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = {name: own for name, own in SETTINGS.items() if any(word in name for word in args.only)}
    with ExitStack() as stack:
        options: dict[str, Any] = {"max_model_len": 512, "speculative_config": None, "use_tqdm_on_load": False}
        if args.shape:
            folder, _ = stack.enter_context(building_shape(BenchOptions(shape=args.shape), lambda text: None))
            options |= {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
        recipe = find_recipe(args.workload)
        params = SamplingParams(temperature=0, max_tokens=recipe.max_tokens, ignore_eos=True, detokenize=False)
        rates: dict[str, list[float]] = {name: [] for name in settings}
        costs: dict[str, list[float]] = {name: [] for name in settings}
        llms = {name: stack.enter_context(LLM(**options, **own)) for name, own in settings.items()}
        for number in range(args.rounds + 1):
            for name, llm in llms.items():
                workload = make_workload(args.workload, number, llm.config.model_config.vocab_size)
                prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
                began, computed = time.perf_counter(), time.thread_time()
                llm.generate(prompts, params, use_tqdm=False)
                if number:  # the first warms up
                    rates[name].append(workload.output_tokens / (time.perf_counter() - began))
                    costs[name].append((time.thread_time() - computed) / workload.output_tokens * 1e6)
        for name in settings:
            rate = statistics.median(rates[name])
            print(
                f"{name:32} {rate:9.1f} tokens/s; {1000 / rate:7.2f} ms a token; "
                f"{statistics.median(costs[name]):8.1f} us of the program's thread a token"
            )


if __name__ == "__main__":
    main()
