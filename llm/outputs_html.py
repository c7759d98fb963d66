"""Outputs as HTML for notebooks: a table of many, and the tokens of one, tinted by their probability.

Owns the markup: escaped text, inline styles, no script, nothing from elsewhere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm.outputs import CompletionOutput, Logprob, RequestOutput

_MOST_ROWS = 100
_MOST_CHARACTERS = 400
_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap;padding:2px 8px"
_ERROR = "background:#fde0dd;color:#7a0014"
_HEADINGS = ("index", "prompt", "text", "tokens", "finish reason")


@dataclass(frozen=True)
class TokenView:
    """The tokens of an output: HTML in a notebook, a table of text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def outputs_table(outputs: Sequence[RequestOutput]) -> str:
    """A row per completion, of the first 100 outputs; errors are marked."""
    body = "".join(_row(output, own) for output in outputs[:_MOST_ROWS] for own in output.outputs)
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in _HEADINGS)
    errors = sum(output.error is not None for output in outputs)
    notes = [f"{len(outputs):,} outputs"]
    notes += [f"{errors:,} with an error"] if errors else []
    notes += [f"the first {_MOST_ROWS} are shown"] if len(outputs) > _MOST_ROWS else []
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{', '.join(notes)}</p>"


def token_view(output: RequestOutput) -> TokenView:
    """Every completion of an output. Without logprobs tokens have no tint, and the text is shown as it is."""
    parts = [f"<p><b>prompt</b> {_text(_clipped(output.prompt or f'{len(output.prompt_token_ids)} token ids'))}</p>"]
    lines = []
    for own in output.outputs:
        ended = own.finish_reason if own.error is None else f"{own.finish_reason}: {own.error}"
        style = f' style="{_ERROR}"' if own.error is not None else ""
        parts.append(f"<p{style}><b>{own.index}</b> {_tokens(own)} <i>{_text(str(ended))}</i></p>")
        lines += [f"completion {own.index}: {ended}", *_lines(own)]
    return TokenView(f'<div style="line-height:1.6">{"".join(parts)}</div>', "\n".join(lines))


def _row(output: RequestOutput, own: CompletionOutput) -> str:
    text = own.text if own.error is None else f"{type(own.error).__name__}: {own.error}"
    prompt = output.prompt if output.prompt is not None else f"{len(output.prompt_token_ids)} token ids"
    cells = (str(output.index), _clipped(prompt), _clipped(text), str(len(own.token_ids)), str(own.finish_reason))
    style = f' style="{_ERROR}"' if own.error is not None else ""
    shown = "".join(f'<td style="{_CELL}">{_text(cell)}</td>' for cell in cells)
    return f"<tr{style}>{shown}</tr>"


def _tokens(own: CompletionOutput) -> str:
    if own.logprobs is None or len(own.logprobs) != len(own.token_ids):
        return _text(own.text)
    found = zip(own.token_ids, own.logprobs, strict=True)
    return "".join(_token(token, position) for token, position in found)


def _token(token: int, position: dict[int, Logprob]) -> str:
    own = position[token]
    shade = 1.0 - _probability(own)
    others = "\n".join(f"{_probability(item):.3f}  {_shown(each, item)}" for each, item in position.items())
    style = f"background:rgba(255,120,0,{0.75 * shade:.2f});white-space:pre-wrap"
    return f'<span style="{style}" title="{_text(others)}">{_text(_shown(token, own))}</span>'


def _lines(own: CompletionOutput) -> list[str]:
    if own.logprobs is None or len(own.logprobs) != len(own.token_ids):
        return [own.text]
    positions = ((f"{_shown(*item)!r} {_probability(item[1]):.3f}" for item in each.items()) for each in own.logprobs)
    return ["  " + ", ".join(shown) for shown in positions]


def _shown(token: int, item: Logprob) -> str:
    return f"<{token}>" if item.decoded_token is None else item.decoded_token


def _probability(item: Logprob) -> float:
    """0 to 1, whatever `logprobs_mode` reports."""
    return math.exp(min(0.0, item.logprob)) if not math.isnan(item.logprob) else 0.0


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ... ({len(text):,} characters)"


def _text(text: str) -> str:
    """Escaped; control characters are shown as U+FFFD, and text in another direction stays in its place."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
    return html.escape(shown, quote=True)
