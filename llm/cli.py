"""The command line: `python -m llm generate "In the beginning"`.

Text goes to stdout as it is generated; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from llm import __version__
from llm.base.command_line import add_engine_flags, add_other_flags, engine_arguments, one_by_one
from llm.base.text import clip
from llm.base.types import Commands
from llm.errors import LLMError, ValidationError, is_out_of_memory

if TYPE_CHECKING:
    from llm.inputs import PromptType
    from llm.llm import LLM
    from llm.sampling_params import SamplingParams


_DEFAULT_MAX_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 for a user's mistake (one sentence), 130 for Ctrl-C."""
    try:
        args = parsed(sys.argv[1:] if argv is None else argv)
        return args.run(args)
    except LLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (`| head`).
        _discard_stdout()
        return 0
    except (OSError, MemoryError, RuntimeError) as error:  # a full disk behind `> file`, for example
        if is_out_of_memory(error):
            print(
                f"error: the machine is out of memory ({clip(str(error).strip() or 'MemoryError')}).", file=sys.stderr
            )
            return 1
        if not isinstance(error, OSError):
            raise
        print(f"error: {error.strerror or error}.", file=sys.stderr)
        _discard_stdout()
        return 1


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """A command and its options. Ends the program, with its usage, where one is unknown."""
    given, parser = one_by_one(argv), _parser()
    args, rest = parser.parse_known_args(given)
    if not rest:
        return args
    if hasattr(args, "engine_command"):
        add_other_flags(args.engine_command, rest)
    return parser.parse_args(given)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null: flushing Python's buffer at exit would raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llm", description="Run language models in this process.")
    parser.add_argument("--version", action="version", version=f"offline-llm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_kernels(commands)
    _add_quantization(commands)
    _add_jobs(commands)
    _add_plan(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_doctor(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    from llm.tools.serve.server import add_command

    add_command(commands)


def _add_chat(commands: Commands) -> None:
    from llm.tools.chat import add_command

    add_command(commands)


def _add_doctor(commands: Commands) -> None:
    command = commands.add_parser(
        "doctor",
        help="show this machine and installation, and what is wrong with them",
        description="Print what a bug report needs, and common faults with what to do. The text names no host, user or "
        "path of yours. The exit status is 1 if something is wrong.",
    )
    command.add_argument(
        "--device", metavar="NAME", help="such as cuda: compare every kernel of that device with its definition, anew"
    )
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from llm.tools.doctor import report, report_device

    return report() if args.device is None else report_device(args.device)


def _add_jobs(commands: Commands) -> None:
    from llm.jobs.command import add_commands

    add_commands(commands)


def _add_quantization(commands: Commands) -> None:
    from llm.tools.quantization_command import add_command

    add_command(commands)


def _add_kernels(commands: Commands) -> None:
    from llm.kernels.command import add_command

    add_command(commands)


def _add_bench(commands: Commands) -> None:
    from llm.tools.bench.command import add_command

    add_command(commands)


def _add_generate(commands: Commands) -> None:
    command = commands.add_parser(
        "generate",
        help="continue a prompt, streaming to the terminal",
        description="Continue a prompt: the text goes to standard output as it comes, all else to standard error.",
        epilog="Where no default is given, the model's generation_config.json decides.",
    )
    command.set_defaults(run=_generate)
    command.add_argument("prompt", help="the text to continue; - reads it from standard input")
    command.add_argument("--chat", action="store_true", help="send the prompt as a user's message and show the answer")
    command.add_argument("--model", metavar="NAME", help="model folder or hub name (default: the embedded model)")
    command.add_argument(
        "--max-tokens", metavar="N", type=int, default=_DEFAULT_MAX_TOKENS, help="end here (default: %(default)s)"
    )
    command.add_argument("--stop", metavar="TEXT", action="append", help="end at this text; may be given several times")
    command.add_argument("--temperature", metavar="T", type=float, help="0: always the likeliest token; up to 2")
    command.add_argument("--top-k", metavar="K", type=int, help="draw among the K likeliest tokens")
    command.add_argument("--top-p", metavar="P", type=float, help="draw among the likeliest that sum to P")
    command.add_argument("--min-p", metavar="P", type=float, help="drop tokens below P times the likeliest")
    command.add_argument("--seed", metavar="N", type=int, help="makes the answer reproducible")
    command.add_argument("--extra-args", metavar="JSON", help='for logits processors: {"target_token": 67}')
    add_engine_flags(command, leave_out=("seed",))


def _add_explain(commands: Commands) -> None:
    command = commands.add_parser(
        "explain",
        help="show what each operation of a model runs, and why",
        description="Load a model and show what each operation, layer and quant method of it runs, and why.",
    )
    command.set_defaults(run=_explain)
    command.add_argument("model", nargs="?", help="model folder or hub name (default: the embedded model)")
    command.add_argument("--dummy", action="store_true", help="do not read the weights")
    add_engine_flags(command)


def _explain(args: argparse.Namespace) -> int:
    from llm.llm import EMBEDDED_MODEL, LLM

    given = {"max_num_seqs": 1, "skip_tokenizer_init": True, **engine_arguments(args)}
    if args.dummy:
        given["load_format"] = "dummy"
    with LLM(EMBEDDED_MODEL if args.model is None else args.model, **given) as llm:
        print(llm.explain())
    return 0


def _generate(args: argparse.Namespace) -> int:
    from llm.llm import EMBEDDED_MODEL, LLM

    text = _read_stdin() if args.prompt == "-" else args.prompt
    given = {"max_num_seqs": 1, "seed": args.seed, **engine_arguments(args)}
    with LLM(EMBEDDED_MODEL if args.model is None else args.model, **given) as llm:
        params = _sampling_params(llm, args)
        if args.chat:
            (prompt,) = llm.render_chat([{"role": "user", "content": text}])
            _stream(llm, prompt, params, echo="")
        else:
            _stream(llm, text, params, echo=text)
    return 0


def _read_stdin() -> str:
    """All of standard input, without the newline that ends it."""
    try:
        text = sys.stdin.read().removesuffix("\n") if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise ValidationError(
            f"standard input is not text: byte {error.start} cannot be decoded as {error.encoding}.", parameter="prompt"
        ) from error
    if not text:
        raise ValidationError(
            "standard input is empty; pipe the prompt into it, or pass it as an argument.", parameter="prompt"
        )
    return text


def _sampling_params(llm: LLM, args: argparse.Namespace) -> SamplingParams:
    """The model's defaults, overridden by the command line."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.extra_args is not None:
        given["extra_args"] = _extra_args(args.extra_args)
    return dataclasses.replace(llm.get_default_sampling_params(), **given)


def _extra_args(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        message = f'--extra-args must be JSON such as {{"target_token": 67}}, got {text!r} ({error}).'
        raise ValidationError(message, parameter="extra_args", value=text) from error


def _stream(llm: LLM, prompt: PromptType, params: SamplingParams, echo: str) -> None:
    """Print `echo`, then the text as it is generated. Errors in the prompt are raised before anything is printed."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?" and the run goes on
    started = perf_counter()
    tokens, reason = 0, None
    for state in llm.stream_state(prompt, params):
        completion = state.completions[0]
        tokens, reason = completion.request.num_output_tokens, completion.request.finish_reason
        pieces, completion.pieces[:] = "".join(completion.pieces), []
        print(echo + pieces, end="", flush=True)
        echo = ""
    seconds = perf_counter() - started
    print(flush=True)
    count = "1 token" if tokens == 1 else f"{tokens} tokens"
    print(f"[{count}, {tokens / seconds:.1f} tokens/s, finish reason: {reason}]", file=sys.stderr)


_DOES_NOT_FIT = 3


def _add_plan(commands: Commands) -> None:
    """Add `plan` to the command line's subcommands."""
    command = commands.add_parser(
        "plan",
        help="say what a model would take, before it is loaded",
        description="Show the memory that a model would take, how many sequences fit, and what would make it fit. No "
        f"weight is read. The exit status is {_DOES_NOT_FIT} if the model does not fit.",
    )
    command.set_defaults(run=_run_plan)
    command.add_argument("model", nargs="?", help="model folder or hub name (default: the embedded model)")
    command.add_argument("--calibrate", action="store_true", help="measure this machine for a second, and keep it")
    command.add_argument("--image", metavar="WxH", help="also the tokens of an image of this size: 1024x768")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_engine_flags(command, leave_out=("verbose",))


def _run_plan(args: argparse.Namespace) -> int:
    from llm.llm import EMBEDDED_MODEL, LLM

    model = EMBEDDED_MODEL if args.model is None else args.model
    found = LLM.plan(model, calibrate=args.calibrate, image=args.image, **engine_arguments(args))
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0 if found.fits else _DOES_NOT_FIT
