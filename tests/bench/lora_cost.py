"""What an adapter costs a step: the 0.5B shape with random weights, calls with and without an adapter in turn.

`python tests/bench/lora_cost.py [rounds] [rank]`. Prints the ratio of each workload: the median over rounds of the time
with an adapter by the time without one. A third column calls without one on an LLM that never had adapters.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from llm import LLM, SamplingParams
from llm.inputs import LoRARequest
from llm.tools.bench.workloads import SHAPES

WORKLOADS = {"decode, 1 row": (1, 4, 24), "decode, 8 rows": (8, 4, 24), "prompt of 512": (1, 512, 1)}


def write_adapter(folder: Path, shape: dict[str, Any], rank: int) -> None:
    """Float32 matrices for the seven linear layers of each layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {
        **{f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", hidden), ("k", kv), ("v", kv))},
        "self_attn.o_proj": (hidden, hidden),
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (rows, columns) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns) / 100
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, rank) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def seconds(llm: LLM, workload: tuple[int, int, int], request: LoRARequest | None, start: int) -> float:
    rows, length, tokens = workload
    prompts = [[(start + row + place) % 1000 + 3 for place in range(length)] for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = perf_counter()
    llm.generate(prompts, params, lora_request=request, use_tqdm=False)
    return perf_counter() - started


def main(rounds: int, rank: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        shape = SHAPES["qwen2.5-0.5b"]
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps({**shape, "torch_dtype": "bfloat16"}))
        write_adapter(root / "adapter", shape, rank)
        request = LoRARequest("adapter", 1, str(root / "adapter"))
        common: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024}
        common |= {"enable_prefix_caching": False, "speculative_config": None}
        with (
            LLM(root / "model", enable_lora=True, max_lora_rank=rank, **common) as llm,
            LLM(root / "model", **common) as plain,
        ):
            for name, workload in WORKLOADS.items():
                ways = ((llm, None), (llm, request), (plain, None))
                times: list[list[float]] = [[], [], []]
                for turn in range(rounds + 1):
                    for own, (used, adapter) in zip(times, ways, strict=True):
                        taken = seconds(used, workload, adapter, turn)
                        own += [taken] if turn else []  # the first call loads, and records steps
                without, with_one, never = map(statistics.median, times)
                ratio = statistics.median(b / a for a, b in zip(times[0], times[1], strict=True))
                print(
                    f"{name:<16}{1e3 * without:8.1f} ms without, {1e3 * with_one:8.1f} with: {ratio:.3f}; "
                    f"never enabled {1e3 * never:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main(*(int(value) for value in sys.argv[1:]) if len(sys.argv) == 3 else (7, 16))
