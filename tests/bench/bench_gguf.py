"""The same GGUF files in llama.cpp and here: the page's table.

    python tests/bench/bench_gguf.py write --folder /tmp/gguf   # once
    python tests/bench/bench_gguf.py run --folder /tmp/gguf --llama-python /tmp/venv_llamacpp/bin/python --page

`write` saves the embedded model, and Qwen2.5-0.5B's shape with random weights, by `save_quantized(..., "gguf")`. `run`
starts a process for each engine and file, one after the other. Workloads are those of `bench_experts.py`. Timings need
a machine that does nothing else; `--only tiny` leaves the larger model out.

Greedy tokens of w2 are compared. Where a row first differs, our logprob of our token less that of llama.cpp's is the
gap: llama.cpp rounds activations to 8 bits, so small gaps are expected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import bench_experts as experts
import torch

MARKS = ("<!-- llama.cpp -->", "<!-- end of llama.cpp -->")
SHAPE = "qwen2.5-0.5b"
SCHEMES = {"Q8_0": "q8_0", "Q4_K": "q4_k"}
# With int8 activations, as llama.cpp has them.
REQUANTIZED = {"Q8_0": "w8a8", "Q4_K": "w4a8"}
MODELS = {"tiny": "the embedded model", SHAPE: "Qwen2.5-0.5B's shape"}


def write(args: argparse.Namespace) -> int:
    from llm import LLM
    from llm.llm import EMBEDDED_MODEL
    from llm.tools.bench.workloads import find_shape

    folder = Path(args.folder)
    source = folder / "random"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps({**find_shape(SHAPE), "dtype": "bfloat16"}))
    experts.write_checkpoint(source)
    for name, model in (("tiny", EMBEDDED_MODEL), (SHAPE, source)):
        for kind, scheme in SCHEMES.items():
            with LLM(model, quantization=scheme, max_model_len=128, skip_tokenizer_init=True) as llm:
                print(llm.save_quantized(folder / f"{name}-{kind}.gguf", "gguf"), flush=True)
    return 0


def vocabulary_of(file: Path) -> int:
    from llm.loading.gguf.source import GgufSource

    return int(GgufSource(file).config()["vocab_size"])


def child(args: argparse.Namespace) -> int:
    """Our side: rates, greedy tokens of w2, and the gaps to llama.cpp's tokens where there are such."""
    from llm import LLM

    file = Path(args.file)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_dtype": "float32", "speculative_config": None}
    options["requantize"] = args.requantize
    with LLM(file, max_model_len=128, max_num_seqs=experts.ROWS, enable_prefix_caching=False, **options) as llm:
        size = llm.config.model_config.vocab_size
        found = experts.measure(experts.greedy(llm), size, bytes=file.stat().st_size)
        theirs = json.loads(sys.stdin.read() or "[]")
        found["gaps"] = gaps(llm, experts.prompts_of(size)[1], found["tokens"], theirs) if theirs else []
    print(json.dumps(found))
    return 0


def gaps(llm: Any, prompts: list[list[int]], mine: Any, theirs: list[list[int]]) -> list[float]:
    """Of each row that differs: our logprob of our token less that of theirs, at the first difference."""
    found = []
    for prompt, own, other in zip(prompts, mine, theirs, strict=True):
        at = next((index for index, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            context = [*prompt, *own[:at]]
            scored = llm.loglikelihood([{"prompt_token_ids": context}] * 2, [[own[at]], [other[at]]])
            found.append(float(scored[0].logprob) - float(scored[1].logprob))
    return found


def run(args: argparse.Namespace) -> int:
    rows: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
    for name in MODELS:
        if args.only and name not in args.only.split(","):
            continue
        for kind in SCHEMES:
            file = Path(args.folder, f"{name}-{kind}.gguf")
            prompts = experts.prompts_of(vocabulary_of(file))
            task = {"file": str(file), "prompts": prompts, "new": experts.NEW_TOKENS, "runs": experts.RUNS}
            script = str(Path(__file__).with_name("llama_cpp_child.py"))
            theirs = experts.answer([args.llama_python, script, json.dumps(task)])
            own = [sys.executable, __file__, "child", "--file", str(file)]
            for label, more in ((kind, []), (f"{kind} as {REQUANTIZED[kind]}", ["--requantize", REQUANTIZED[kind]])):
                rows.append((name, label, experts.answer(own + more, json.dumps(theirs["tokens"])), theirs))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if args.page:
        experts.replace_in_page(section(text), MARKS)
    return 0


def table(rows: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> str:
    """Ours, then llama.cpp's, in each cell."""
    lines = [
        "| | file, MB | w1: prefill, ms | w1: one token, ms | w2: tokens/s | same tokens | largest gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind, ours, theirs in rows:
        prefill, token = (
            ", ".join(f"{each[key] * 1e3:.3g}" for each in (ours, theirs)) for key in ("prefill", "token")
        )
        rate = ", ".join(f"{each['rate']:.0f}" for each in (ours, theirs))
        same, gap = experts.shared(ours["tokens"], theirs["tokens"]), max(ours["gaps"], default=0.0)
        size = f"{ours['bytes'] / 1e6:.1f}"
        lines.append(f"| {MODELS[name]}, {kind} | {size} | {prefill} | {token} | {rate} | {same:.0%} | {gap:.2f} |")
    return "\n".join(lines)


def section(text: str) -> str:
    intro = f"""
        The same GGUF files, of `save_quantized`, here and in llama.cpp, on {len(os.sched_getaffinity(0))}
        cores of {experts.cpu()}: ours, then llama.cpp's. w1 is a prompt of {experts.STREAM_PROMPT} and
        {experts.NEW_TOKENS} new tokens, w2 {experts.ROWS} prompts of {experts.LENGTHS[0]} to {experts.LENGTHS[1]}.
        "as w8a8" is `LLM(file, requantize="w8a8")`, with int8 activations. "Same tokens" is the share of w2's greedy
        tokens before a row's first difference; the gap there is our logprob of our token less that of llama.cpp's,
        which rounds activations to 8 bits. `tests/bench/bench_gguf.py` measures it."""
    return f"\n{textwrap.fill(' '.join(intro.split()), 120)}\n\n{text}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("write", write), ("run", run), ("child", child)):
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        command.add_argument("--file" if name == "child" else "--folder", required=True)
        if name == "child":
            command.add_argument("--requantize")
        if name == "run":
            command.add_argument("--llama-python", required=True, help="interpreter with llama-cpp-python")
            command.add_argument("--only", help=f"of {', '.join(MODELS)}, with commas")
            command.add_argument("--page", action="store_true", help="replace the page's table")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
