"""What captures and interventions cost: the throughput of a batch, as a share of that of a call without any.

`python tests/bench/inside_cost.py [smollm2-135m] [rounds]`. One thread, in its CPU time, which other programs disturb
least. The calls of a round run one after the other, a plain one first and last; printed are the medians over the
rounds, and the least and most.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from llm import LLM, Capture, Intervention, SamplingParams
from llm.tools.bench import workloads as shapes

ROWS, PROMPT, NEW = 12, 48, 32


def calls(llm: LLM) -> dict[str, dict[str, object]]:
    """What each call captures and changes."""
    layers = 1 + max(int(name.split(".")[1]) for name in llm.sites() if name.startswith("layers."))
    middle = f"layers.{layers // 2}"
    vector = torch.randn(llm.sites()[f"{middle}.output"].shape, generator=torch.Generator().manual_seed(0))
    return {
        "one layer's output, last": {"capture": Capture(f"{middle}.output", "last")},
        "one layer's output, all": {"capture": Capture(f"{middle}.output", "all")},
        "all layers' outputs, last": {"capture": Capture("layers.*.output", "last")},
        "all layers' outputs, all": {"capture": Capture("layers.*.output", "all")},
        "one MLP's output, all": {"capture": Capture(f"{middle}.mlp.output", "all")},
        "all MLPs' outputs, all": {"capture": Capture("layers.*.mlp.output", "all")},
        "one layer steered, all": {"interventions": Intervention.add(f"{middle}.output", vector, 0.01)},
        "logits, all": {"capture": Capture("logits", "all")},
    }


def seconds(llm: LLM, more: dict[str, object]) -> float:
    rows = [[(7 * row + 3 * place) % 900 + 5 for place in range(PROMPT)] for row in range(ROWS)]
    prompts = [{"prompt_token_ids": ids} for ids in rows]
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    started = time.process_time()
    llm.generate(prompts, params, use_tqdm=False, **more)
    return time.process_time() - started


def main() -> None:
    shape, rounds = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_config(shape, "bfloat16", Path(folder))
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=512, num_threads=1) as llm:
            asked = calls(llm)
            for more in ({}, *asked.values(), {}):
                seconds(llm, more)
            shares: dict[str, list[float]] = {name: [] for name in ["plain, again", *asked]}
            plain = []
            for _ in range(rounds):
                first = seconds(llm, {})
                taken = {name: seconds(llm, more) for name, more in asked.items()}
                last = seconds(llm, {})
                plain.append((first + last) / 2)
                for name, own in {"plain, again": last, **taken}.items():
                    shares[name].append((first if name == "plain, again" else plain[-1]) / own)
            rate = ROWS * NEW / statistics.median(plain)
            print(f"{shape}, {ROWS} rows of {PROMPT} + {NEW}: {rate:.0f} tokens per second of CPU time")
            for name, own in shares.items():
                print(f"{name:28} {statistics.median(own):.2f}  ({min(own):.2f} to {max(own):.2f})")


if __name__ == "__main__":
    main()
