"""`python -m llm bench`: arguments in, tables or JSON out.

Imports no PyTorch: the command imports it and the engine when it runs, and measures the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from time import perf_counter

from llm.base.command_line import add_engine_flags, engine_arguments
from llm.base.types import Commands
from llm.tools.bench.workloads import RECIPES, SHAPES, BenchOptions, invalid

_IMPORTS = ("torch", "llm.llm")
# Arguments of LLM that an option of the benchmark sets -> that option.
_TAKEN = {"model": "--model", "load_format": "--shape", "dtype": "--dtype", "quantization": "--quantization"}


def add_command(commands: Commands) -> None:
    """Add `bench` to the command line's subcommands."""
    command = commands.add_parser(
        "bench",
        help="measure speed, start-up and memory, against what this machine can do",
        description="Measure speed, start-up and memory. The read bandwidth and float32 GEMM rate of the machine are "
        "measured first; every figure is shown with the best that they allow (its floor).",
        epilog="Workloads: " + "; ".join(f"{name} = {recipe.about}" for name, recipe in RECIPES.items()) + ".",
        allow_abbrev=False,
    )
    command.set_defaults(run=_bench)
    command.add_argument("--model", metavar="NAME", help="model folder or hub name (default: the embedded model)")
    command.add_argument(
        "--shape",
        metavar="NAME",
        help=f"a shape with random weights instead, published (or model-b, a small llama): {', '.join(SHAPES)}",
    )
    command.add_argument("--weight-dtype", metavar="TYPE", help="a shape's weights: float32 (default) or bfloat16")
    command.add_argument("--workload", metavar="NAMES", default="w1,w2", help="separated by commas (default: w1,w2)")
    command.add_argument("--reps", metavar="N", type=int, default=3, help="runs of each; medians count (default: 3)")
    command.add_argument("--threads", metavar="N", type=int, help="threads to compute with (default: PyTorch's choice)")
    command.add_argument("--against", metavar="ENGINE", help="transformers: alternate with transformers.generate")
    command.add_argument("--profile", action="store_true", help="one more run of each workload: time per operation")
    command.add_argument("--sampler", action="store_true", help="measure the sampler alone, on random logits")
    command.add_argument(
        "--speculation", action="store_true", help="measure one stream with and without drafted tokens"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_engine_flags(command)
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of LLM(...), as JSON or text, e.g. max_num_batched_tokens=512; may be repeated",
    )
    command.add_argument(
        "--calibrate",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="how long to measure each of the machine's two rates; 0: not, and show no floors (default: 2)",
    )


def read_options(args: argparse.Namespace) -> BenchOptions:
    """The options; raises `ValidationError` for a combination that cannot be measured."""
    engine = dict(map(_parse_option, args.option))
    engine |= engine_arguments(args)
    return BenchOptions(
        model=args.model,
        shape=args.shape,
        weight_dtype=args.weight_dtype,
        workloads=tuple(dict.fromkeys(name.strip().lower() for name in args.workload.split(","))),
        reps=args.reps,
        threads=args.threads,
        calibrate_seconds=args.calibrate,
        against=args.against,
        profile=args.profile,
        engine=engine,
    )


def time_imports() -> dict[str, float]:
    """Seconds to import PyTorch, then this engine; modules that are already imported are left out."""
    seconds = {}
    for name in _IMPORTS:
        if name not in sys.modules:
            started = perf_counter()
            importlib.import_module(name)
            seconds[name] = perf_counter() - started
    return seconds


def _bench_sampler(args: argparse.Namespace, options: BenchOptions) -> int:
    """Benchmark the sampler. It needs no model, so options that concern a model are refused."""
    others = dataclasses.replace(options, reps=BenchOptions.reps, threads=None)
    if others != BenchOptions():
        name = next(item.name for item in dataclasses.fields(others) if getattr(others, item.name) != item.default)
        raise invalid("sampler", True, f"alone, with --reps, --threads and --json: {name} concerns a model")
    from llm.tools.bench.sampler import as_line, as_object, run_sampler_bench

    _use_threads(options)
    if args.json:
        print(json.dumps(as_object(run_sampler_bench(options.reps)), indent=2))
    else:
        run_sampler_bench(options.reps, report=lambda figure: print(as_line(figure), flush=True))
    return 0


def _bench_speculation(args: argparse.Namespace, options: BenchOptions) -> int:
    """Benchmark speculative decoding; options that choose workloads or a rival are refused."""
    for name in ("against", "profile", "workloads"):
        if getattr(options, name) != getattr(BenchOptions, name):
            raise invalid("speculation", True, f"without {name}: it has workloads of its own")
    from llm.tools.bench.session import Progress
    from llm.tools.bench.speculation import as_line, as_object, run_speculation_bench

    _use_threads(options)
    if args.json:
        print(json.dumps(as_object(run_speculation_bench(options, Progress())), indent=2))
    else:
        run_speculation_bench(options, Progress(), report=lambda figure: print(as_line(figure), flush=True))
    return 0


def _use_threads(options: BenchOptions) -> None:
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)


def _bench(args: argparse.Namespace) -> int:
    options = read_options(args)
    if args.sampler:
        return _bench_sampler(args, options)
    if args.speculation:
        return _bench_speculation(args, options)
    imports = time_imports()
    from llm.tools.bench.report import as_object, as_text
    from llm.tools.bench.session import Progress, run_session

    report = as_object(run_session(options, imports, Progress()))
    print(json.dumps(report, indent=2, allow_nan=False) if args.json else as_text(report))
    return 0


def _parse_option(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise invalid("option", text, "NAME=VALUE")
    if name in _TAKEN:
        raise invalid("option", text, f"left out: {_TAKEN[name]} sets it")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
