"""`python -m llm quantization`: compares quantization schemes on a model, as a Markdown table.

Owns the arguments and the table; `measure.py` owns the measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from llm.base.checks import refuse
from llm.base.errors import ValidationError
from llm.base.types import Commands

SCHEMES = ("w8a8", "w8a16", "w4a16", "w4a8", "fp8", "mxfp4")
_HEADINGS = ("quantization", "weights", "perplexity", "change", "same next token", "greedy tokens", "least dB")


def add_command(commands: Commands) -> None:
    """Add `quantization` to the command line's subcommands."""
    command = commands.add_parser(
        "quantization",
        help="compare quantization schemes on a model",
        description="Score texts with the unquantized model and with each scheme, and print a Markdown table.",
    )
    command.set_defaults(run=_run)
    command.add_argument("--model", metavar="NAME", help="unquantized model folder or hub name (default: the embedded)")
    command.add_argument("--texts", metavar="FILE", type=Path, required=True, help="texts, separated by form feeds")
    command.add_argument(
        "--schemes", metavar="NAME", nargs="+", default=list(SCHEMES), help=f"default: {' '.join(SCHEMES)}"
    )
    command.add_argument("--calibration", metavar="FILE", type=Path, help="texts to calibrate with, other than those")


def _run(args: argparse.Namespace) -> int:
    for line in table(args.model, _read(args.texts), args.schemes, args.calibration and _read(args.calibration)):
        print(line, flush=True)
    return 0


def table(
    model: str | Path | None, texts: list[str], schemes: list[str], calibration: list[str] | None
) -> Iterator[str]:
    """The lines of a Markdown table: the unquantized model, then each scheme compared with it."""
    from llm.api import EMBEDDED_MODEL, LLM
    from llm.quantization.configs.online import RECIPES
    from llm.quantize.measure import agreement, common_prefix, greedy_tokens, prompts_from, score_texts

    for scheme in schemes:
        if scheme not in RECIPES:
            refuse("schemes", scheme, f"of {', '.join(RECIPES)}")
    model = EMBEDDED_MODEL if model is None else model
    yield _row(_HEADINGS)
    yield _row(["---"] * len(_HEADINGS))
    with LLM(model) as llm:
        prompts = prompts_from(llm, texts)
        before, tokens = score_texts(llm, texts), greedy_tokens(llm, prompts)
        layers = llm._open_engine().runner.layer_reports()
        bytes_before = sum(layer.bytes_after for layer in layers)
        yield _row(["none", f"{bytes_before:,} B", f"{before.perplexity:.4f}", "", "", "", ""])
    for scheme in schemes:
        with LLM(model, quantization=scheme, calibration=calibration) as llm:
            after = score_texts(llm, texts)
            shares = [common_prefix(*pair) for pair in zip(tokens, greedy_tokens(llm, prompts), strict=True)]
            layers = llm._open_engine().runner.layer_reports()
            size = sum(layer.bytes_after for layer in layers)
            least = min(layer.weight_snr for layer in layers if layer.weight_snr is not None)
            yield _row(
                [
                    scheme,
                    f"{size:,} B ({size / bytes_before:.0%})",
                    f"{after.perplexity:.4f}",
                    f"{after.perplexity / before.perplexity - 1:+.2%}",
                    f"{agreement(before.likeliest, after.likeliest):.1%}",
                    f"{sum(shares) / len(shares):.0%}",
                    f"{least:.1f}",
                ]
            )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _read(path: Path) -> list[str]:
    try:
        return [text for text in path.read_text("utf-8").split("\f") if text.strip()]
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise ValidationError(message, parameter="texts", value=str(path)) from error
