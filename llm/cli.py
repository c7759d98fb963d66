"""The command line: `python -m llm generate "In the beginning"`.

Owns argument parsing and what is printed. Text goes to stdout as it is generated; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from llm import __version__
from llm.errors import LLMError

_DEFAULT_MAX_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a mistake of the user (one sentence), 130 for Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except LLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`): Python would complain again when it flushes stdout at exit.
        sys.stdout = None
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llm", description="Run language models in this process.")
    parser.add_argument("--version", action="version", version=f"offline-llm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    return parser


def _add_generate(commands: Any) -> None:
    command = commands.add_parser("generate", help="continue a prompt, streaming to the terminal")
    command.set_defaults(run=_generate)
    command.add_argument("prompt", help="the text to continue; - reads it from standard input")
    command.add_argument("--model", help="model folder or hub name (default: the embedded model)")
    command.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    command.add_argument(
        "--max-tokens", type=int, default=_DEFAULT_MAX_TOKENS, help="most tokens (default: %(default)s)"
    )
    for name in ("temperature", "top-p", "min-p"):
        command.add_argument(f"--{name}", type=float, help="default: what the model's generation_config.json says")
    command.add_argument("--top-k", type=int, help="default: what the model's generation_config.json says")
    command.add_argument("--seed", type=int, help="makes the answer reproducible")
    command.add_argument("--stop", action="append", help="end at this string; may be repeated")
    command.add_argument("--max-model-len", type=int, help="most tokens of prompt and output together")
    command.add_argument("--verbose", action="store_true", help="show what was decided, and why")


def _generate(args: argparse.Namespace) -> int:
    from llm.api import EMBEDDED_MODEL, LLM

    prompt: Any = sys.stdin.read() if args.prompt == "-" else args.prompt
    with LLM(
        args.model or EMBEDDED_MODEL,
        max_model_len=args.max_model_len,
        max_num_seqs=1,
        seed=args.seed if args.seed is not None else None,
        verbose=args.verbose,
    ) as llm:
        params = _sampling_params(llm, args)
        if args.chat:
            prompt = _chat_prompt(llm, prompt)
        else:
            print(prompt, end="", flush=True)
        _stream(llm, prompt, params)
    return 0


def _sampling_params(llm: Any, args: argparse.Namespace) -> Any:
    """The model's defaults with what the command line says instead."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(llm.get_default_sampling_params(), **given)


def _chat_prompt(llm: Any, text: str) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": text}]
    return {"prompt_token_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)}


def _stream(llm: Any, prompt: Any, params: Any) -> None:
    started = perf_counter()
    tokens, reason = 0, None
    for state in llm.stream_state(prompt, params):
        completion = state.completions[0]
        tokens, reason = completion.request.num_output_tokens, completion.request.finish_reason
        while completion.pieces:
            print(completion.pieces.pop(0), end="", flush=True)
    seconds = perf_counter() - started
    print()
    print(f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s, finish reason: {reason}]", file=sys.stderr)
