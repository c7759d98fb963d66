"""`python -m llm run IN OUT` and `python -m llm merge OUT`.

The output's path goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.command_line import add_engine_flags, add_lora_modules, engine_arguments, lora_modules_of
from llm.base.types import Commands, JsonObject
from llm.errors import JobInterrupted, ValidationError
from llm.pooling_params import PoolingParams
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.jobs.job import JobSummary

# --task -> (runner, convert) of `LLM`.
_TASKS = {"auto": ("auto", "auto"), "generate": ("generate", "auto")}
_TASKS |= {name: ("pooling", name) for name in ("embed", "classify")}
_INTERRUPTED = 128  # plus the signal's number: the exit status by the shells' convention


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "run",
        help="answer the rows of a file into another; can be interrupted and resumed",
        description="Answer the rows of a file into another: OpenAI's batch format, or JSONL, CSV or Parquet with a "
        "prompt per row. Ctrl-C, SIGTERM, a crash or a full disk loses nothing that was finished: --resume goes on. A "
        "model for embeddings or classes answers with vectors, classes, or scores of pairs (columns text_1, text_2).",
        epilog="Exit status: 0: complete; 1: an error; 130 or 143: Ctrl-C or SIGTERM, go on with --resume.",
    )
    command.set_defaults(run=_run)
    command.add_argument("input", metavar="IN", help="a .jsonl, .csv or .parquet file")
    command.add_argument("output", metavar="OUT", help="a .jsonl, .csv or .parquet file, which appears when complete")
    command.add_argument("--model", metavar="NAME", help="model folder or hub name (default: the embedded model)")
    command.add_argument("--resume", action="store_true", help="go on where a run was interrupted, if one was")
    command.add_argument(
        "--shard",
        metavar="I/N",
        help="answer every N-th row from the I-th on (from 0); auto: as torchrun, SLURM or Kubernetes say; see merge",
    )
    command.add_argument("--column", metavar="NAME", help="the column of the prompts (default: prompt, or messages)")
    command.add_argument("--image-column", metavar="NAME", help="the column of images: paths, base64 or bytes")
    command.add_argument("--video-column", metavar="NAME", help="the column of videos: lists of frames")
    command.add_argument("--template", metavar="TEXT", help='makes prompts from columns: "Translate: {text}"')
    command.add_argument(
        "--params", metavar="JSON", help='sampling params: {"temperature": 0, "max_tokens": 64}; or pooling params'
    )
    command.add_argument(
        "--row-params",
        action="store_true",
        help="columns with the names of params (max_tokens, temperature, ...) are those of their rows",
    )
    command.add_argument("--task", choices=(*_TASKS,), default="auto", help="auto: what the checkpoint is for")
    command.add_argument("--lora", metavar="FOLDER", help="the adapter of all rows")
    add_lora_modules(command)
    command.add_argument("--on-error", choices=("return", "raise"), default="return", help="raise: refuse bad rows")
    command.add_argument(
        "--on-too-long", choices=("error", "truncate_left", "truncate_middle", "skip"), default="error"
    )
    add_engine_flags(command)
    merge = commands.add_parser(
        "merge",
        help="put the parts of a sharded run into one file",
        description="Put OUT.shard-0-of-N ... beside OUT into OUT: the file that one process would have written.",
    )
    merge.set_defaults(run=_merge)
    merge.add_argument("output", metavar="OUT", help="the output that the shards were given")


def _run(args: argparse.Namespace) -> int:
    from llm.inputs import LoRARequest
    from llm.jobs.job import JobFiles, RunOptions
    from llm.llm import EMBEDDED_MODEL, LLM

    given, modules = _params(args.params), lora_modules_of(args)
    _check_params(given, args.task)
    options = RunOptions(
        column=args.column,
        template=args.template,
        resume=args.resume,
        shard=args.shard,
        on_error=args.on_error,
        on_too_long=args.on_too_long,
        row_params=args.row_params,
        image_column=args.image_column,
        video_column=args.video_column,
    )
    JobFiles.of(args.input, args.output, options)  # wrong paths are refused before the model is loaded
    runner, convert = _TASKS[args.task]
    engine = {"runner": runner, "convert": convert, "enable_lora": bool(modules or args.lora)}
    with LLM(EMBEDDED_MODEL if args.model is None else args.model, **{**engine, **engine_arguments(args)}) as llm:
        is_pooling = llm.config.model_config.runner_type == "pooling"
        try:
            summary = llm.run(
                args.input,
                args.output,
                None if is_pooling else dataclasses.replace(llm.get_default_sampling_params(), **given),
                pooling_params=PoolingParams(**given) if is_pooling else None,
                lora_request=LoRARequest(Path(args.lora).name, 1, args.lora) if args.lora else None,
                lora_modules=modules,
                **vars(options),
            )
        except JobInterrupted as interrupted:
            print(f"{interrupted}: --resume", file=sys.stderr)
            return _INTERRUPTED + (interrupted.signal or signal.SIGINT)
    _report(summary, is_pooling)
    return 0


def _report(summary: JobSummary, is_pooling: bool) -> None:
    print(summary.output)
    tokens = f"{summary.num_prompt_tokens} prompt" if is_pooling else f"{summary.num_generated_tokens}"
    print(
        f"[{summary.num_rows} rows, {summary.num_resumed} of them from an earlier run, {summary.num_errors} with an "
        f"error; {tokens} tokens, {summary.seconds:.1f} s]",
        file=sys.stderr,
    )


def _params(text: str | None) -> JsonObject:
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        message = f'--params must be JSON such as {{"max_tokens": 64}}, got {text!r} ({error}).'
        raise ValidationError(message, parameter="params", value=text) from error
    if not isinstance(given, dict):
        raise ValidationError(f"--params must be a JSON object, got {text!r}.", parameter="params", value=text)
    return given


def _check_params(given: JsonObject, task: str) -> None:
    """Raise `ValidationError` for params that no model of the task takes, before it is loaded."""
    if task != "generate":
        try:
            PoolingParams(**given)
            return
        except (TypeError, ValidationError):
            if task != "auto":
                raise
    SamplingParams(**given)


def _merge(args: argparse.Namespace) -> int:
    from llm.jobs.shard import merge

    count = merge(Path(args.output))
    print(args.output)
    print(f"[{count} rows]", file=sys.stderr)
    return 0
