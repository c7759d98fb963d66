"""Outputs as tables: for pandas and Arrow, as Parquet and as JSONL.

Owns the columns. There is one row per completion, and the columns and their types are the same whatever happened: a
prompt that was refused has a row with its error, no outputs give a table without rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.optional import optional_package
from llm.base.types import JsonObject
from llm.outputs_json import output_as_json

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from llm.outputs import RequestOutput

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


class Exports:
    """The ways out of an output, or of a list of them."""

    def _listed(self) -> Sequence[RequestOutput]:
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """A row per completion; the columns are those of `llm.outputs_table.COLUMNS`."""
        frames, columns = optional_package("pandas", "pandas"), _columns(self._listed())
        return frames.DataFrame({name: frames.Series(columns[name], dtype=kind) for name, (_, kind) in COLUMNS.items()})

    def to_arrow(self) -> pyarrow.Table:
        """As `to_pandas`, an Arrow table."""
        arrow, columns = optional_package("pyarrow", "arrow"), _columns(self._listed())
        types = {kind: getattr(arrow, kind)() for kind, _ in COLUMNS.values() if kind != "list"}
        types["list"] = arrow.list_(arrow.int32())
        schema = arrow.schema([(name, types[kind]) for name, (kind, _) in COLUMNS.items()])
        return arrow.table(columns, schema=schema)

    def to_parquet(self, path: str | Path) -> Path:
        """Write `to_arrow()` to a file; returns its path."""
        optional_package("pyarrow.parquet", "arrow").write_table(self.to_arrow(), path)
        return Path(path)

    def to_jsonl(self, path: str | Path) -> Path:
        """Write everything about each prompt as a line of JSON, logprobs included; returns the file's path."""
        with Path(path).open("w", encoding="utf-8") as file:
            for output in self._listed():
                file.write(json.dumps(output_as_json(output), ensure_ascii=False) + "\n")
        return Path(path)


def _columns(outputs: Sequence[RequestOutput]) -> dict[str, list[object]]:
    rows = [row for output in outputs for row in _rows(output)]
    return {name: [row[name] for row in rows] for name in COLUMNS}


def _rows(output: RequestOutput) -> list[JsonObject]:
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
