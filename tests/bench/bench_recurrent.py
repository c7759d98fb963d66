"""Models with recurrent states beside transformers, and their steps after 8,192 tokens beside attention alone.

    python tests/bench/bench_recurrent.py write --folder /tmp/recurrent   # once: the checkpoints
    python tests/bench/bench_recurrent.py run --folder /tmp/recurrent --page
    python tests/bench/bench_recurrent.py context --page

`run` measures one stream and a batch of each shape as bench_experts.py does, in a process for each contestant, and
prints the page's table. `context` times decode steps by the length of the context, of a shape and of the same shape
with attention in all layers, and writes the page's picture (it needs matplotlib). Timings need a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import bench_experts
import torch

from llm.kernels.select import backend_for
from llm.platforms import select_platform
from llm.runner.inspection import ModelCost
from llm.tools.bench.machine import _read_rate

ROOT = Path(__file__).parents[2]
MARKS = ("<!-- recurrent -->", "<!-- end of recurrent -->")
CONTEXT_MARKS = ("<!-- recurrent context -->", "<!-- end of recurrent context -->")
PICTURE = "docs/images/context.svg"
# Shape -> layers that are kept: the first, so that transformers is done in a minute.
SHAPES = {"lfm2-1.2b": 8, "granite-4.0-h-350m": 16}
OURS: dict[str, dict[str, object]] = {"bfloat16": {}, "w8a8": {"quantization": "w8a8"}}
RIVAL = "transformers, float32"
TURNS = 7
LENGTHS = (256, 1024, 2048, 4096, 8192)
CONTEXT_SHAPE, STEPS = "granite-4.0-h-350m", 32


def config_of(shape: str, layers: int) -> dict[str, Any]:
    from llm.tools.bench.workloads import find_shape

    config = {**find_shape(shape), "dtype": "bfloat16", "num_hidden_layers": layers}
    config["layer_types"] = config["layer_types"][:layers]
    return config


def write(args: argparse.Namespace) -> int:
    for shape, layers in SHAPES.items():
        folder = Path(args.folder, shape)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(shape, layers), indent=2))
        bench_experts.write_checkpoint(folder)
    return 0


def child(args: argparse.Namespace) -> int:
    if args.contestant == RIVAL:
        bench_experts.RUNS = 1  # it takes longer than what disturbs it
        print(json.dumps(bench_experts.transformers(args.folder, "float32")))
    else:
        print(json.dumps(ours(args.folder, OURS[args.contestant])))
    return 0


def ours(folder: str, arguments: dict[str, object]) -> dict[str, object]:
    """The rate at which memory is read changes from minute to minute on a shared machine: it is measured in turns."""
    from llm import LLM

    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "kv_cache_dtype": "float32"}
    options |= {"speculative_config": None, "max_model_len": 128, "max_num_seqs": bench_experts.ROWS}
    with LLM(folder, **options, **arguments) as llm:
        cost, generate = llm._open_engine().runner.cost(), bench_experts.greedy(llm)
        vocabulary = llm.config.model_config.vocab_size
        found = bench_experts.measure(generate, vocabulary, bytes=cost.weight_bytes)
        [prompts, _] = bench_experts.prompts_of(vocabulary)
        turns = [(floor_of(cost), token_time(generate, prompts)) for _ in range(TURNS)]
    token, share = median(token for _, token in turns), median(floor / token for floor, token in turns)
    return {**found, "token": token, "share": share}


def floor_of(cost: ModelCost) -> float:
    """Seconds in which what a token needs is read, and the states written; of several reads the median."""
    size, backend = cost.bytes_per_step, backend_for(select_platform("cpu")[0])
    with torch.inference_mode():
        reads = [_read_rate(backend, *kind, size, 0.3) for kind in (("bfloat16", "float"), *cost.arithmetic)]
    return (size + 2 * cost.state_bytes) / max(rate.best * (1 - rate.spread) for rate in reads)


def token_time(generate: Any, prompts: list[list[int]]) -> float:
    times = []
    for new in (1, bench_experts.NEW_TOKENS):
        started = perf_counter()
        generate(prompts, new)
        times.append(perf_counter() - started)
    return (times[1] - times[0]) / (bench_experts.NEW_TOKENS - 1)


def run(args: argparse.Namespace) -> int:
    lines = [
        "| | weights, GB | one stream: token, ms | of the floor | batch: tokens/s | times transformers |",
        "|---|---|---|---|---|---|",
    ]
    for shape in args.only.split(",") if args.only else SHAPES:
        found = {name: measured(str(Path(args.folder, shape)), name) for name in (RIVAL, *OURS)}
        for name, its in found.items():
            floor = f"{its['share']:.2f}" if "share" in its else ""
            cells = f"{its['bytes'] / 1e9:.2f} | {its['token'] * 1e3:.1f} | {floor} | {its['rate']:.0f}"
            lines.append(f"| {shape}, {name} | {cells} | {its['rate'] / found[RIVAL]['rate']:.1f} |")
            print(lines[-1], flush=True)
    if args.page:
        cut = " and ".join(f"{layers} layers of {shape}" for shape, layers in SHAPES.items())
        intro = f"""
            Recurrent states: the first {cut}, random weights, on {len(os.sched_getaffinity(0))} cores of
            {bench_experts.cpu()}: a stream of {bench_experts.NEW_TOKENS} tokens, and a batch of {bench_experts.ROWS}
            prompts of {bench_experts.LENGTHS[0]} to {bench_experts.LENGTHS[1]} and {bench_experts.NEW_TOKENS} new
            tokens each. The floor of a token is the time in which the weights are read and the states are read and
            written, at the rate of as many bytes in the turns between the streams; both are medians.
            `tests/bench/bench_recurrent.py` measures it."""
        text = f"\n{textwrap.fill(' '.join(intro.split()), 120)}\n\n" + "\n".join(lines) + "\n"
        bench_experts.replace_in_page(text, MARKS)
    return 0


def measured(folder: str, contestant: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "child", "--folder", folder, "--contestant", contestant]
    return bench_experts.answer(command)


# Long contexts.


def context(args: argparse.Namespace) -> int:
    """Milliseconds of a step and bytes of state, by the length of the context."""
    whole = config_of(CONTEXT_SHAPE, args.layers)
    attention = {**whole, "layer_types": ["attention"] * args.layers}
    found = {"hybrid": by_length(whole), "attention": by_length(attention)}
    rows = ["| tokens of context | " + " | ".join(f"{name}: step, ms | state, MB" for name in found) + " |"]
    rows.append("|---" * (1 + 2 * len(found)) + "|")
    for index, length in enumerate(LENGTHS):
        cells = (f"{ms[index]:.1f} | {size[index] / 1e6:.1f}" for ms, size in found.values())
        rows.append(f"| {length:,} | " + " | ".join(cells) + " |")
    print("\n".join(rows))
    if args.page:
        draw(found)
        intro = f"""
            One stream by the length of its context: {args.layers} layers of {CONTEXT_SHAPE}, of which
            {whole["layer_types"].count("attention")} have attention, beside the same layers with attention in all."""
        text = f"\n{textwrap.fill(' '.join(intro.split()), 120)}\n\n"
        text += "![Step time and state by context](../images/context.svg)\n\n"
        text += "\n".join(rows) + "\n"
        bench_experts.replace_in_page(text, CONTEXT_MARKS)
    return 0


def by_length(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Of one stream: (milliseconds of a decode step, bytes of its state), at each of `LENGTHS`."""
    import tempfile

    from llm import LLM, SamplingParams

    times, sizes = [], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
        options |= {"speculative_config": None, "use_tqdm_on_load": False, "max_num_seqs": 1}
        with LLM(folder, max_model_len=LENGTHS[-1] + STEPS, **options) as llm:
            specs = llm._open_engine().runner.plan.kv_cache_specs
            params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
            for length in LENGTHS:
                tokens = torch.randint(3, 1000, (length - STEPS,)).tolist()
                [output] = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
                times.append(1e3 * (output.metrics.last_token_ts - output.metrics.first_token_ts) / (STEPS - 1))
                sizes.append(sum(length * spec.bytes_per_token() + spec.bytes_per_request() for spec in specs))
    return times, sizes


def draw(found: dict[str, tuple[list[float], list[float]]]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for name, (times, sizes) in found.items():
        axes[0].plot(LENGTHS, times, marker="o", label=name)
        axes[1].plot(LENGTHS, [size / 1e6 for size in sizes], marker="o", label=name)
    for axis, what in zip(axes, ("a step, ms", "state of a request, MB"), strict=True):
        axis.set(xlabel="tokens of context", ylabel=what, ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    (ROOT / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(ROOT / PICTURE, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (write, run, child, context):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        if function is context:
            command.add_argument("--layers", type=int, default=16, help="the first layers (default: %(default)s)")
        else:
            command.add_argument("--folder", required=True)
        if function is child:
            command.add_argument("--contestant", required=True)
        elif function is not write:
            command.add_argument("--page", action="store_true", help="replace the page's table or picture")
        if function is run:
            command.add_argument("--only", help="shapes, separated by commas")
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
