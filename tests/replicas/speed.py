"""Two replicas of one thread against one process of two threads, in turn; and what one replica costs beside no replica.

    PYTHONPATH=.:tests python tests/replicas/speed.py                       # the embedded model
    PYTHONPATH=.:tests python tests/replicas/speed.py --shape qwen2.5-0.5b  # random weights, workload w2

Prints output tokens a second, the median of `--rounds`, and the processor time of the program itself a token.
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with ExitStack() as stack:
        options: dict[str, Any] = {"max_model_len": 512, "speculative_config": None, "use_tqdm_on_load": False}
        if args.shape:
            folder, _ = stack.enter_context(building_shape(BenchOptions(shape=args.shape), lambda text: None))
            options |= {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
        recipe = find_recipe("w2")
        params = SamplingParams(temperature=0, max_tokens=recipe.max_tokens, ignore_eos=True, detokenize=False)
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        costs: dict[str, list[float]] = {name: [] for name in SETTINGS}
        llms = {name: stack.enter_context(LLM(**options, **own)) for name, own in SETTINGS.items()}
        for number in range(args.rounds + 1):
            for name, llm in llms.items():
                workload = make_workload("w2", number, llm.config.model_config.vocab_size)
                prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
                began, computed = time.perf_counter(), time.thread_time()
                llm.generate(prompts, params, use_tqdm=False)
                if number:  # the first warms up
                    rates[name].append(workload.output_tokens / (time.perf_counter() - began))
                    costs[name].append((time.thread_time() - computed) / workload.output_tokens * 1e6)
        for name in SETTINGS:
            print(
                f"{name:32} {statistics.median(rates[name]):9.1f} tokens/s; "
                f"{statistics.median(costs[name]):8.1f} us of the program's thread a token"
            )


if __name__ == "__main__":
    main()
