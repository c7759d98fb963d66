"""A model half again as large as the memory that a control group allows: the same tokens, slowly, and no kill.

    python tests/setup/offload.py                      # 3 GiB of weights, 2 GiB of memory
    python tests/setup/offload.py --gib 6 --experts 0  # a dense model

Run by hand, as root: it makes a control group, writes gigabytes, and takes minutes. It starts children in the group:
one that reads the weights from a file as planned; one that is told to refuse; and, as the control of the limit, one
that is made to believe there is more memory, which has to be killed. Fast checks are in tests/setup/test_offload.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

GIB = 1 << 30
PROMPTS = [list(range(5 + row, 45 + row)) for row in range(2)]
NEW_TOKENS = 16
HIDDEN, EXPERT, VOCABULARY, HEADS, HEAD_SIZE = 1024, 512, 8192, 8, 128
# What a child does; its argument is JSON.
CHILD = """
import json, sys, time
from dataclasses import replace
task = json.loads(sys.argv[1])
from llm import LLM, SamplingParams
from llm.platforms.cpu import CpuPlatform

def mark():
    lines = open("/proc/self/io").read().splitlines()
    return time.perf_counter(), next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

if task["lie"]:
    CpuPlatform.memory_free = lambda self: 1 << 40
marks = [mark()]
options = {"skip_tokenizer_init": True, "enable_prefix_caching": False, **task["arguments"]}
llm = LLM(task["model"], max_model_len=256, max_num_seqs=4, **options)
marks.append(mark())
params = SamplingParams(temperature=0.0, max_tokens=task["new"], ignore_eos=True, detokenize=False)
for each in (replace(params, max_tokens=1), params):
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, each, use_tqdm=False)]
    marks.append(mark())
lines = [line for line in str(llm.config).splitlines() if line.startswith(("offload", "resident"))]
print(json.dumps({"tokens": tokens, "config": lines, "marks": marks}))
"""


def write_model(folder: Path, target: int, experts: int) -> int:
    """A Qwen 3 of about `target` bytes, with experts or (0) without; returns its bytes."""
    wide = {"intermediate_size": 4 * HIDDEN}
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": EXPERT,
        "norm_topk_prob": True,
    }
    per_layer = 2 * HIDDEN * 3 * (EXPERT * experts if experts else 4 * HIDDEN) + 2 * HIDDEN * HEAD_SIZE * HEADS * 4
    layers = max(1, round((target - 4 * VOCABULARY * HIDDEN) / per_layer))
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        **{"hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS, "head_dim": HEAD_SIZE},
        **{
            "num_key_value_heads": HEADS,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "dtype": "bfloat16",
        },
        **{"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"},
        **{"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "dtype": "bfloat16"},
        **wide,
        **(mixture if experts else {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(1)).mul_(0.04).bfloat16()
    weight_map, total = {}, 0
    for layer in range(-1, layers):
        tensors = {}
        for name, shape in tensors_of(layer, experts).items():
            start = total // 2 * 7919 % (1 << 23)
            count = shape[0] * (shape[1] if len(shape) == 2 else 1)
            tensors[name] = pool[start : start + count].view(shape).clone() if len(shape) == 2 else torch.ones(shape)
            total += tensors[name].nbytes
        file = f"model-{layer + 1:03}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def tensors_of(layer: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors; -1: of those outside of the layers."""
    if layer < 0:
        table = (VOCABULARY, HIDDEN)
        return {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (HIDDEN,)}
    path, inner = f"model.layers.{layer}", HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        f"{path}.input_layernorm.weight": (HIDDEN,),
        f"{path}.post_attention_layernorm.weight": (HIDDEN,),
        f"{path}.self_attn.q_norm.weight": (HEAD_SIZE,),
        f"{path}.self_attn.k_norm.weight": (HEAD_SIZE,),
        f"{path}.self_attn.o_proj.weight": (HIDDEN, inner),
    }
    shapes |= {f"{path}.self_attn.{part}_proj.weight": (inner, HIDDEN) for part in "qkv"}
    if experts:
        shapes[f"{path}.mlp.gate.weight"] = (experts, HIDDEN)
    width = EXPERT if experts else 4 * HIDDEN
    for where in [f"{path}.mlp.experts.{index}" for index in range(experts)] or [f"{path}.mlp"]:
        shapes |= {f"{where}.{part}_proj.weight": (width, HIDDEN) for part in ("gate", "up")}
        shapes[f"{where}.down_proj.weight"] = (HIDDEN, width)
    return shapes


class Group:
    """A control group of this process's own group, version 1 or 2, with a memory limit."""

    def __init__(self, limit: int) -> None:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next((line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(",")), None)
        base = Path("/sys/fs/cgroup" if path is None else f"/sys/fs/cgroup/memory{path}")
        self.folder = base / f"offload-{os.getpid()}"
        self.folder.mkdir()
        self._names = (
            ("memory.max", "memory.peak") if path is None else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        )
        (self.folder / self._names[0]).write_text(str(limit))

    def peak(self) -> int:
        return int((self.folder / self._names[1]).read_text())

    def remove(self) -> None:
        self.folder.rmdir()


def child(
    model: Path, group: Group | None, lie: bool = False, **arguments: object
) -> tuple[int, dict[str, object], str]:
    """(exit code, what it printed, its errors) of a child, in the group if there is one."""
    task = json.dumps({"model": str(model), "prompts": PROMPTS, "new": NEW_TOKENS, "lie": lie, "arguments": arguments})
    enter = "" if group is None else f"echo $$ > {group.folder}/cgroup.procs; "
    command = ["sh", "-c", f'{enter}exec "$0" -c "$1" "$2"', sys.executable, CHILD, task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def show(what: str, result: tuple[int, dict[str, object], str], started: float) -> None:
    code, found, errors = result
    print(f"\n{what}: exit {code} after {time.perf_counter() - started:.0f} s")
    if found:
        (load, _), (prefill, prefill_read), (both, both_read) = (
            (end[0] - start[0], end[1] - start[1]) for start, end in itertools.pairwise(found["marks"])
        )
        step, step_read = (
            (first - other) / (NEW_TOKENS - 1) for first, other in ((both, prefill), (both_read, prefill_read))
        )
        print(f"  load {load:.1f} s, prefill {prefill:.1f} s, {step:.2f} s and {step_read / GIB:.2f} GiB read a step")
        print("\n".join(f"  {line}" for line in found["config"]))
    elif errors:
        print(f"  {errors.strip().splitlines()[-1][:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the weights (default: 3)")
    parser.add_argument("--ratio", type=float, default=1.5, help="of the weights to the limit (default: 1.5)")
    parser.add_argument("--experts", type=int, default=64, help="in each layer; 0: a dense model (default: 64)")
    parser.add_argument("--quantization", help="as in LLM(quantization=...); the size is of the bfloat16 weights")
    parser.add_argument("--folder", help="where the model is written (default: a temporary folder)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="offload-", dir=args.folder))
    group = None
    try:
        total = write_model(folder, round(args.gib * GIB), args.experts)
        limit = round(total / args.ratio)
        print(f"weights: {total:,} bytes; limit: {limit:,} bytes")
        group = Group(limit)
        given = {} if args.quantization is None else {"quantization": args.quantization}
        results = []
        for what, where, options in (
            ("without a limit", None, {"offload_weights": False}),
            ("in the group", group, {}),
            ("in the group, refusing a file", group, {"offload_weights": False}),
            ("in the group, without the plan", group, {"offload_weights": False, "lie": True}),
        ):
            started = time.perf_counter()
            results.append(child(folder, where, **given, **options))
            show(what, results[-1], started)
            if what == "in the group":
                print(f"  most memory of the group: {group.peak():,} bytes")
        free, limited, refused, killed = results
        wrong = []
        if limited[1].get("tokens") is None or limited[1].get("tokens") != free[1].get("tokens"):
            wrong.append("the tokens differ")
        if "OutOfMemoryError" not in refused[2]:
            wrong.append("nothing was refused")
        if killed[0] not in (-9, 137):
            wrong.append("the limit kills nobody")
        print("\n" + ("; ".join(wrong) or "the same tokens; the control was killed"))
        return bool(wrong)
    finally:
        if group is not None:
            group.remove()
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
