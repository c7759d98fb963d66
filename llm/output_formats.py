"""Outputs as plain data for JSON, as tables (pandas, Arrow, Parquet, JSONL), and as HTML for notebooks.

`llm.jobs.journal` is the way back from JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.optional import optional_package
from llm.base.text import show
from llm.base.types import JsonObject
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from _typeshed import DataclassInstance

    from llm.outputs import CompletionOutput, Logprob, RequestOutput

# --- JSON: `json.dumps` takes it as it is, and floats come back bit for bit. ---


def output_as_json(output: RequestOutput) -> JsonObject:
    """Everything about one prompt but the times, so that equal answers are equal text; logprobs are a list of tokens
    per position."""
    scores = output.prompt_token_id_logprobs
    return {
        "request_id": output.request_id,
        "index": output.index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_completion_as_json(own) for own in output.outputs],
        "finished": output.finished,
        "num_cached_tokens": output.num_cached_tokens,
        "num_dropped_tokens": output.num_dropped_tokens,
        "seed": output.seed,
        "prompt_logprobs": _positions_as_json(output.prompt_logprobs),
        **({} if scores is None else {"prompt_token_id_logprobs": scores.tolist()}),
        "params": None if output.params is None else params_as_json(output.params),
        "lora_request": None if output.lora_request is None else dataclasses.asdict(output.lora_request),
    }


def params_as_json(params: SamplingParams) -> JsonObject:
    """The fields that differ from their defaults."""
    fields = ((item.name, getattr(params, item.name), item.default) for item in dataclasses.fields(params))
    return {name: plain(value) for name, value, default in fields if value != default and value != []}


def plain(value: object) -> object:
    """Data for JSON; what is none by its `repr`, shortened."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "model_json_schema"):  # pydantic
        return plain(value.model_json_schema())
    return value if value is None or isinstance(value, str | int | float | bool) else show(value)


def error_as_json(error: Exception | None) -> JsonObject | None:
    if error is None:
        return None
    kept = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
    return {"type": type(error).__name__, "message": str(error), **kept}


def _plain_fields(value: DataclassInstance) -> JsonObject:
    return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}


def _completion_as_json(own: CompletionOutput) -> JsonObject:
    return {
        "index": own.index,
        "text": own.text,
        "token_ids": own.token_ids,
        "cumulative_logprob": own.cumulative_logprob,
        "logprobs": _positions_as_json(own.logprobs),
        "finish_reason": own.finish_reason,
        "stop_reason": own.stop_reason,
        "error": error_as_json(own.error),
        "structured": None if own.structured is None else dataclasses.asdict(own.structured),
    }


def _positions_as_json(positions: Sequence[dict[int, Logprob] | None] | None) -> list[list[JsonObject] | None] | None:
    if positions is None:
        return None
    return [
        None if position is None else [_token_as_json(*item) for item in position.items()] for position in positions
    ]


def _token_as_json(token_id: int, item: Logprob) -> JsonObject:
    return {"token_id": token_id, "logprob": item.logprob, "rank": item.rank, "decoded_token": item.decoded_token}


# --- Tables: a row per completion. Columns and types are the same whatever happened: a refused prompt has a row with
# its error, and no outputs give a table without rows. ---

# Column -> (type in Arrow, in pandas). Texts that are missing are "", but for `prompt`, null for one of token ids.
COLUMNS: dict[str, tuple[str, str]] = {
    "index": ("int64", "int64"),
    "completion": ("int32", "int32"),
    "prompt": ("string", "object"),
    "text": ("string", "object"),
    "finish_reason": ("string", "object"),
    "stop_reason": ("string", "object"),
    "token_ids": ("list", "object"),
    "num_prompt_tokens": ("int32", "int32"),
    "num_tokens": ("int32", "int32"),
    "num_cached_tokens": ("int32", "int32"),
    "num_dropped_tokens": ("int32", "int32"),
    "cumulative_logprob": ("float64", "float64"),
    "seed": ("uint64", "UInt64"),
    "error_type": ("string", "object"),
    "error": ("string", "object"),
}


def to_pandas(outputs: Sequence[RequestOutput]) -> pandas.DataFrame:
    frames, columns = optional_package("pandas", "pandas"), _columns(outputs)
    return frames.DataFrame({name: frames.Series(columns[name], dtype=kind) for name, (_, kind) in COLUMNS.items()})


def to_arrow(outputs: Sequence[RequestOutput]) -> pyarrow.Table:
    arrow, columns = optional_package("pyarrow", "arrow"), _columns(outputs)
    types = {kind: getattr(arrow, kind)() for kind, _ in COLUMNS.values() if kind != "list"}
    types["list"] = arrow.list_(arrow.int32())
    schema = arrow.schema([(name, types[kind]) for name, (kind, _) in COLUMNS.items()])
    return arrow.table(columns, schema=schema)


def write_parquet(outputs: Sequence[RequestOutput], path: str | Path) -> Path:
    optional_package("pyarrow.parquet", "arrow").write_table(to_arrow(outputs), path)
    return Path(path)


def write_jsonl(outputs: Sequence[RequestOutput], path: str | Path) -> Path:
    with Path(path).open("w", encoding="utf-8") as file:
        for output in outputs:
            file.write(json.dumps(output_as_json(output), ensure_ascii=False) + "\n")
    return Path(path)


def _columns(outputs: Sequence[RequestOutput]) -> dict[str, list[object]]:
    rows = [row for output in outputs for row in _table_rows(output)]
    return {name: [row[name] for row in rows] for name in COLUMNS}


def _table_rows(output: RequestOutput) -> list[JsonObject]:
    of_prompt = {
        "index": output.index,
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_dropped_tokens": output.num_dropped_tokens,
        "seed": output.seed,
    }
    return [
        {
            **of_prompt,
            "completion": own.index,
            "text": own.text,
            "finish_reason": own.finish_reason or "",
            "stop_reason": "" if own.stop_reason is None else str(own.stop_reason),
            "token_ids": own.token_ids,
            "num_tokens": len(own.token_ids),
            "cumulative_logprob": own.cumulative_logprob,
            "error_type": "" if own.error is None else type(own.error).__name__,
            "error": "" if own.error is None else str(own.error),
        }
        for own in output.outputs
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# --- HTML: escaped text, inline styles, no script, nothing from elsewhere. ---


def html_table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def row(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"


_MOST_ROWS = 100
_MOST_CHARACTERS = 400
_CELL_STYLE = "text-align:left;vertical-align:top;white-space:pre-wrap;padding:2px 8px"
_ERROR_STYLE = "background:#fde0dd;color:#7a0014"
_HEADINGS = ("index", "prompt", "text", "tokens", "finish reason")


def outputs_table(outputs: Sequence[RequestOutput]) -> str:
    """A row per completion, of the first 100 outputs; errors are marked."""
    body = "".join(_html_row(output, own) for output in outputs[:_MOST_ROWS] for own in output.outputs)
    head = "".join(f'<th style="{_CELL_STYLE}">{name}</th>' for name in _HEADINGS)
    errors = sum(output.error is not None for output in outputs)
    notes = [f"{len(outputs):,} outputs"]
    notes += [f"{errors:,} with an error"] if errors else []
    notes += [f"the first {_MOST_ROWS} are shown"] if len(outputs) > _MOST_ROWS else []
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{', '.join(notes)}</p>"


def token_view(output: RequestOutput) -> tuple[str, str]:
    """(HTML, text) of every completion. Without logprobs tokens have no tint, and the text is shown as it is."""
    parts = [f"<p><b>prompt</b> {_text(_clipped(output.prompt or f'{len(output.prompt_token_ids)} token ids'))}</p>"]
    lines = []
    for own in output.outputs:
        ended = own.finish_reason if own.error is None else f"{own.finish_reason}: {own.error}"
        style = f' style="{_ERROR_STYLE}"' if own.error is not None else ""
        parts.append(f"<p{style}><b>{own.index}</b> {_tokens(own)} <i>{_text(str(ended))}</i></p>")
        lines += [f"completion {own.index}: {ended}", *_lines(own)]
    return f'<div style="line-height:1.6">{"".join(parts)}</div>', "\n".join(lines)


def _html_row(output: RequestOutput, own: CompletionOutput) -> str:
    text = own.text if own.error is None else f"{type(own.error).__name__}: {own.error}"
    prompt = output.prompt if output.prompt is not None else f"{len(output.prompt_token_ids)} token ids"
    cells = (str(output.index), _clipped(prompt), _clipped(text), str(len(own.token_ids)), str(own.finish_reason))
    style = f' style="{_ERROR_STYLE}"' if own.error is not None else ""
    shown = "".join(f'<td style="{_CELL_STYLE}">{_text(cell)}</td>' for cell in cells)
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
