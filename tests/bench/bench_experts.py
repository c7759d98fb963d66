"""Mixtures of experts beside transformers and llama.cpp, on the same random weights: the page's table.

    python tests/bench/bench_experts.py write --shape qwen3-30b-a3b-6gb --folder /tmp/experts   # once
    python tests/bench/bench_experts.py run --folder /tmp/experts --llama-python /tmp/venv_llamacpp/bin/python --page

`write` makes a checkpoint, and GGUF files in BF16 and Q8_0 (it needs the `gguf` package). `run` starts a process for
each contestant, one after the other, so that each has the machine and its memory for itself, and prints the table; with
`--page` it replaces the page's of this family. `--results` is a file that keeps the figures of each contestant:
those that it has are not measured again, so a run may be done in parts. llama-cpp-python is asked for by its
interpreter, because it belongs into an environment of its own. Timings need a machine that does nothing else.

Workloads, of random token ids, greedy: w1, one stream, a prompt of 64 and 32 new tokens; w2, 16 prompts of 16 to 64 and
32 new tokens each. Each is run twice, and the better counts: what disturbs a run makes it slower, never faster.
`--layers` takes the first layers alone, for a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "speed.md"
# model_type -> the page's marks, and the model's name.
MARKS = {
    "qwen3_moe": ("<!-- experts -->", "<!-- end of experts -->"),
    "gpt_oss": ("<!-- experts of gpt-oss -->", "<!-- end of experts of gpt-oss -->"),
}
NAMES = {"qwen3_moe": "Qwen3-30B-A3B", "gpt_oss": "gpt-oss-20b"}
NEW_TOKENS, RUNS, STREAM_PROMPT, ROWS, LENGTHS = 32, 2, 64, 16, (16, 64)
# Contestant -> what `LLM` is given.
OURS: dict[str, dict[str, object]] = {
    "offline-llm, bfloat16": {},
    "offline-llm, w8a8": {"quantization": "w8a8"},
    "offline-llm, w8a16": {"quantization": "w8a16"},
    "offline-llm, w4a16": {"quantization": "w4a16"},
    "offline-llm, w4a8": {"quantization": "w4a8"},
}
TRANSFORMERS = {"transformers, float32": "float32", "transformers, bfloat16": "bfloat16"}
LLAMA = {"llama.cpp, BF16": "BF16", "llama.cpp, Q8_0": "Q8_0"}


# Writing.


def write(args: argparse.Namespace) -> int:
    """The checkpoint, then the GGUF files."""
    from llm.tools.bench.workloads import find_shape

    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**find_shape(args.shape), "dtype": "bfloat16", **json.loads(args.config)}
    if args.layers:
        config["num_hidden_layers"] = args.layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: args.layers]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_checkpoint(folder)
    from gguf_experts import write_gguf  # not everybody has gguf

    for kind in LLAMA.values():
        write_gguf(folder, kind)
    return 0


def write_checkpoint(folder: Path) -> None:
    """Random weights under the published names, one file per layer; the same whenever they are written."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        shapes = dict(AutoModelForCausalLM.from_config(config).state_dict())
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in shapes.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "others"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = tensor.shape
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(1)
    for file, tensors in files.items():
        made = {}
        for name, shape in tensors.items():
            tensor = random_tensor(name, shape, generator)
            made |= published(name, tensor) if config.model_type == "qwen3_moe" else {name: tensor}
        save_file(made, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(made, file)
        print(f"{file}: {sum(tensor.nbytes for tensor in made.values()):,} bytes", flush=True)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Small embeddings are lost in what the layers add: one token, and so its experts, would come again and again."""
    if len(shape) == 1 and "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape).normal_(0.0, 1.0 if "embed" in name else 0.04, generator=generator).bfloat16()


def published(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Qwen's files have a tensor per expert; transformers holds them stacked."""
    start, middle, last = name.partition(".experts.")
    if not middle:
        return {name: tensor}
    if last == "down_proj":
        return {f"{start}.experts.{index}.down_proj.weight": part.clone() for index, part in enumerate(tensor)}
    found = {}
    for index, part in enumerate(tensor):
        for proj, rows in zip(("gate_proj", "up_proj"), part.chunk(2), strict=True):
            found[f"{start}.experts.{index}.{proj}.weight"] = rows.clone()
    return found


# Contestants, each in a process of its own. They print one line of JSON.


def prompts_of(vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of w1 and of w2."""
    random = Random(5)

    def tokens(count: int) -> list[int]:
        return [random.randrange(3, vocabulary) for _ in range(count)]

    return [tokens(STREAM_PROMPT)], [tokens(random.randint(*LENGTHS)) for _ in range(ROWS)]


def measure(generate: Any, vocabulary: int, **more: object) -> dict[str, object]:
    """`generate(prompts, new)` gives the new tokens of each."""
    stream, batch = prompts_of(vocabulary)
    generate([prompt[:8] for prompt in batch], 2)
    best = {"first": 1e9, "stream": 1e9, "batch": 1e9}
    for _ in range(RUNS):
        for name, prompts, new in (("first", stream, 1), ("stream", stream, NEW_TOKENS), ("batch", batch, NEW_TOKENS)):
            started = perf_counter()
            tokens = generate(prompts, new)
            best[name] = min(best[name], perf_counter() - started)
    token = (best["stream"] - best["first"]) / (NEW_TOKENS - 1)
    rate = ROWS * NEW_TOKENS / best["batch"]
    return {"prefill": best["first"], "token": token, "rate": rate, "tokens": tokens, **more}


def greedy(llm: Any) -> Callable[[list[list[int]], int], list[list[int]]]:
    """`generate(prompts, new)` of an `LLM`: the likeliest tokens of each prompt, past any end."""
    from llm import SamplingParams

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in llm.generate(asked, params, use_tqdm=False)]

    return generate


def ours(folder: str, arguments: dict[str, object]) -> dict[str, object]:
    from llm import LLM
    from llm.tools.bench.machine import calibrate, calibrate_for

    before = calibrate(1.0).rates.bytes_per_s
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "kv_cache_dtype": "float32"}
    options["speculative_config"] = None  # drafts from random text say nothing of other text
    started = perf_counter()
    with LLM(folder, max_model_len=128, max_num_seqs=ROWS, **options, **arguments) as llm:
        load, cost = perf_counter() - started, llm._open_engine().runner.cost()
        found = measure(greedy(llm), llm.config.model_config.vocab_size, load=load, bytes=cost.weight_bytes)
    # The better counts, as of the runs. What every step reads may be in the caches; other experts than before are not.
    known = calibrate_for(calibrate(1.0), cost, 1.0)
    memory = max(before, known.read.best)
    near = max(memory, known.rates.bytes_per_s)
    floor = cost.chosen_bytes / memory + (cost.bytes_per_step - cost.chosen_bytes + 2 * cost.state_bytes) / near
    return {**found, "floor": floor, "memory": memory, "near": near}


def transformers(folder: str, dtype: str) -> dict[str, object]:
    from llm.tools.bench.measure import Transformers

    started = perf_counter()
    rival = Transformers.load(Path(folder))
    if dtype == "bfloat16":
        torch.nn.Module.to(rival.model, torch.bfloat16)
    size = sum(parameter.nbytes for parameter in rival.model.parameters())
    load, vocabulary = perf_counter() - started, rival.model.config.vocab_size
    return measure(rival.generate, vocabulary, load=load, bytes=size)


def child(args: argparse.Namespace) -> int:
    if args.contestant in OURS:
        found = ours(args.folder, OURS[args.contestant])
    else:
        found = transformers(args.folder, TRANSFORMERS[args.contestant])
    print(json.dumps(found))
    return 0


# The table.


def contestants(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(name, command)."""
    wanted = [name.strip() for name in args.only.split(";")] if args.only else None
    for name in (*OURS, *TRANSFORMERS, *LLAMA):
        if wanted is not None and name not in wanted:
            continue
        if name in LLAMA:
            file = Path(args.folder, f"model-{LLAMA[name]}.gguf")
            if args.llama_python and file.exists():
                vocabulary = json.loads(Path(args.folder, "config.json").read_text())["vocab_size"]
                task = {"file": str(file), "prompts": prompts_of(vocabulary), "new": NEW_TOKENS, "runs": RUNS}
                script = str(Path(__file__).with_name("llama_cpp_child.py"))
                yield name, [args.llama_python, script, json.dumps(task)]
        elif wanted is not None or name != "transformers, bfloat16":
            yield name, [sys.executable, __file__, "child", "--folder", args.folder, "--contestant", name]


def run(args: argparse.Namespace) -> int:
    kept = Path(args.results) if args.results else None
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for name, command in contestants(args):
        if name in results:
            continue
        started = perf_counter()
        results[name] = answer(command)
        print(f"{name}: {perf_counter() - started:.0f} s in all", file=sys.stderr, flush=True)
        if kept:
            kept.write_text(json.dumps(results))
    text = table({name: results[name] for name in (*OURS, *TRANSFORMERS, *LLAMA) if name in results})
    print(text)
    if args.page:
        config = json.loads(Path(args.folder, "config.json").read_text())
        replace_in_page(section(text, config), MARKS[config["model_type"]])
    return 0


def section(text: str, config: dict[str, Any]) -> str:
    """What stands between the page's marks."""
    layers, size = config["num_hidden_layers"], config["vocab_size"]
    intro = f"""
        A mixture of experts: {NAMES[config["model_type"]]} with {layers} layers and a vocabulary of {size:,}, random
        weights, on {len(os.sched_getaffinity(0))} cores of {cpu()}. w1 is a prompt of {STREAM_PROMPT} and {NEW_TOKENS}
        new tokens, w2 {ROWS} prompts of {LENGTHS[0]} to {LENGTHS[1]} and {NEW_TOKENS} new tokens each. The floor of a
        token is the time in which this machine can read what it needs: its experts at the rate of memory, and the
        weights that every token reads at the best rate for as many bytes, which may be that of the caches. The last
        column is the share of w2's tokens before the first difference from the first line's.
        `tests/bench/bench_experts.py` measures it."""
    return f"\n{textwrap.fill(' '.join(intro.split()), 120)}\n\n{text}\n"


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith("flags"))
    known = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512"}
    best = next((name for flag, name in known.items() if flag in flags), "AVX2")
    return f"a shared machine with {best}"


def answer(words: list[str], given: str = "") -> dict[str, Any]:
    """The last line, JSON, of a command that is given a text; raises `RuntimeError` if it fails.

    Processes that it leaves behind are ended: they hold memory, and a pipe open.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, log = Path(folder, "out"), Path(folder, "err")
        with said.open("w") as out, log.open("w") as err:
            child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True, start_new_session=True
            )
            try:
                child.communicate(given)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        lines, errors = said.read_text().splitlines(), log.read_text()
    if child.returncode or not lines:
        raise RuntimeError(f"{' '.join(words)}: exit {child.returncode}: {errors[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """Agreement is with the first line's tokens: of w2, the share before the first difference."""
    reference = next(iter(results.values()))["tokens"]
    lines = [
        "| | weights, GB | w1: prefill, ms | w1: one token, ms | of the floor | w2: tokens/s | same tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        floor = f"{found['floor'] / found['token']:.2f}" if "floor" in found else ""
        size = f"{found['bytes'] / 1e9:.1f}"
        times = f"{found['prefill'] * 1e3:.0f} | {found['token'] * 1e3:.1f} | {floor} | {found['rate']:.0f}"
        lines.append(f"| {name} | {size} | {times} | {shared(reference, found['tokens']):.0%} |")
    return "\n".join(lines)


def shared(reference: list[list[int]], tokens: list[list[int]]) -> float:
    equal = 0
    for mine, other in zip(reference, tokens, strict=True):
        equal += next((at for at, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]), len(mine))
    return equal / sum(map(len, reference))


def replace_in_page(text: str, marks: tuple[str, str]) -> None:
    """Between the two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(marks[0])
    _, _, after = rest.partition(marks[1])
    PAGE.write_text(f"{before}{marks[0]}\n{text}{marks[1]}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("write", write), ("run", run), ("child", child)):
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        command.add_argument("--folder", required=True)
        if name == "write":
            command.add_argument("--shape", default="qwen3-30b-a3b-6gb")
            command.add_argument("--layers", type=int, help="take the first layers alone")
            command.add_argument("--config", default="{}", help="further keys of config.json, as JSON")
        elif name == "run":
            command.add_argument("--llama-python", help="interpreter with llama-cpp-python; without it, no llama.cpp")
            command.add_argument("--page", action="store_true", help="replace the page's table")
            command.add_argument("--results", help="a file that keeps figures; what it has is not measured again")
            command.add_argument("--only", help="contestants, separated by semicolons")
        else:
            command.add_argument("--contestant", required=True)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
