"""`python -m llm quantization`: compares quantization schemes on a model as a Markdown table, finds the smallest."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llm.base.checks import refuse
from llm.base.types import Commands
from llm.errors import ValidationError

SCHEMES = ("w8a8", "w8a16", "w4a16", "w4a8", "fp8", "mxfp4")
# A scheme of 4 bits with a budget: the sizes between, which are tried too where the smallest is looked for.
_BUDGETS = ("w4a16:5", "w4a16:6", "w4a8:5", "w4a8:6")
_HEADINGS = ("quantization", "weights", "perplexity", "change", "same next token", "greedy tokens", "least dB")


def add_command(commands: Commands) -> None:
    """Add `quantization` to the command line's subcommands."""
    command = commands.add_parser(
        "quantization",
        help="compare quantization schemes on a model",
        description="Score texts with the unquantized model and with each scheme, and print a Markdown table.",
    )
    command.set_defaults(run=_run)
    command.add_argument("model", metavar="MODEL", nargs="?", help="unquantized model folder or hub name")
    command.add_argument("--model", dest="named", metavar="NAME", help="the same (default: the embedded model)")
    command.add_argument("--texts", metavar="FILE", type=Path, required=True, help="texts, separated by form feeds")
    command.add_argument(
        "--schemes",
        metavar="NAME,NAME",
        type=_names,
        help=f"w4a16:5 is w4a16 with bits=5; default: {','.join(SCHEMES)}, and with --find {','.join(_BUDGETS)}",
    )
    command.add_argument("--calibration", metavar="FILE", type=Path, help="texts to calibrate with, other than those")
    command.add_argument(
        "--find", metavar="LOSS", type=_share, help="propose the smallest scheme whose perplexity is within e.g. 1%%"
    )


def _names(text: str) -> list[str]:
    return text.split(",")


def _run(args: argparse.Namespace) -> int:
    if args.model is not None and args.named is not None:
        refuse("model", args.named, f"left out where the model is named already: {args.model}")
    calibration = args.calibration and _read(args.calibration)
    measured: list[Measured] = []
    model = args.named if args.model is None else args.model
    schemes = args.schemes or [*SCHEMES, *(() if args.find is None else _BUDGETS)]
    for line in table(model, _read(args.texts), schemes, calibration, measured):
        print(line, flush=True)
    if args.find is None:
        return 0
    print(f"\n{proposal(measured, args.find)}", flush=True)
    return 0 if any(item.change <= args.find for item in measured) else 1


@dataclass(frozen=True)
class Measured:
    """A scheme as the command names it, the bytes of its weights, and by what share its perplexity is larger."""

    scheme: str
    nbytes: int
    change: float


def asked(scheme: str) -> str | dict[str, object]:
    """What `LLM(quantization=...)` takes for "w4a16", or for "w4a16:5" of the command."""
    name, _, bits = scheme.partition(":")
    if not bits:
        return name
    try:
        budget = float(bits)
    except ValueError:
        refuse("schemes", scheme, "a scheme and a number of bits, such as w4a16:5")
    return {"scheme": name, "bits": int(budget) if budget.is_integer() else budget}


def proposal(measured: Iterable[Measured], loss: float) -> str:
    """The smallest scheme that loses at most `loss`, in a sentence; else the most accurate one."""
    found = sorted(measured, key=lambda item: item.nbytes)
    within = next((item for item in found if item.change <= loss), None)
    if within is not None:
        found_it = f"quantization={asked(within.scheme)!r} is the smallest within {100 * loss:g}%"
        return f"{found_it}: {within.change:+.2%} on these texts."
    best = min(found, key=lambda item: item.change)
    return (
        f"No scheme is within {100 * loss:g}% on these texts; the closest is quantization={asked(best.scheme)!r} with "
        f"{best.change:+.2%}. --calibration FILE makes 4 bits more accurate."
    )


def table(
    model: str | Path | None,
    texts: list[str],
    schemes: list[str],
    calibration: list[str] | None,
    measured: list[Measured] | None = None,
) -> Iterator[str]:
    """The lines of a Markdown table: the unquantized model, then each scheme compared with it; also in `measured`."""
    from llm.llm import EMBEDDED_MODEL, LLM
    from llm.quantization.on_load import RECIPES, OnlineConfig
    from llm.tools.quantization_report import agreement, common_prefix, greedy_tokens, prompts_from, score_texts

    for scheme in schemes:
        if scheme.partition(":")[0] not in RECIPES:
            refuse("schemes", scheme, f"of {', '.join(RECIPES)}, or one with bits such as w4a16:5")
        OnlineConfig.parse(asked(scheme), calibration)
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
        with LLM(model, quantization=asked(scheme), calibration=calibration) as llm:
            after = score_texts(llm, texts)
            shares = [common_prefix(*pair) for pair in zip(tokens, greedy_tokens(llm, prompts), strict=True)]
            layers = llm._open_engine().runner.layer_reports()
            size = sum(layer.bytes_after for layer in layers)
            least = min(layer.weight_snr for layer in layers if layer.weight_snr is not None)
            change = after.perplexity / before.perplexity - 1
            if measured is not None:
                measured.append(Measured(scheme, size, change))
            yield _row(
                [
                    scheme,
                    f"{size:,} B ({size / bytes_before:.0%})",
                    f"{after.perplexity:.4f}",
                    f"{change:+.2%}",
                    f"{agreement(before.likeliest, after.likeliest):.1%}",
                    f"{sum(shares) / len(shares):.0%}",
                    f"{least:.1f}",
                ]
            )


def _share(text: str) -> float:
    """Of "1%" or "0.01"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of perplexity such as 1% or 0.01")
    return value


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _read(path: Path) -> list[str]:
    try:
        return [text for text in path.read_text("utf-8").split("\f") if text.strip()]
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise ValidationError(message, parameter="texts", value=str(path)) from error
