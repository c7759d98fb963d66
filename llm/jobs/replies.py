"""From the answer of a row to its line of the output.

Owns the readers of replies: of conversations with tools and without, and of those that must call.
"""

from __future__ import annotations

from llm.base.types import JsonObject
from llm.engine.output import output_without_run
from llm.engine.preprocess import Preprocessor
from llm.engine.rows import RefusedRow
from llm.jobs.answers import Ended
from llm.jobs.making import Rows, row_error
from llm.jobs.requests import BatchRows, PlainRows
from llm.outputs import RequestOutput
from llm.replies.choice import ToolChoice
from llm.replies.reader import ReplyReader


class Replies:
    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._readers: dict[tuple[bool, bool], ReplyReader] = {}

    def line(self, rows: Rows, row: JsonObject, ended: Ended, model: str) -> tuple[Ended, JsonObject]:
        """The row's line. If it cannot be made of the answer, the row ends with that error."""
        try:
            if ended.output.error is None and isinstance(rows, BatchRows | PlainRows):
                chosen = rows.chosen(row)
                if chosen is not None:
                    self._read(ended.output, *chosen)
            return ended, rows.answer(row, ended, model)
        except Exception as error:
            refused = RefusedRow(ended.output.index, row_error(error), ended.output.prompt)
        ended = Ended(ended.key, output_without_run(refused))
        return ended, rows.answer(row, ended, model)

    def _read(self, output: RequestOutput, choice: ToolChoice, has_tools: bool) -> None:
        """Fill `content`, `reasoning` and `tool_calls` of its completions."""
        kind = choice.forces, has_tools
        if kind not in self._readers:
            self._readers[kind] = self._preprocessor.reply_reader(None, "auto", has_tools, choice.forces)
        self._readers[kind].read([output], choice)
