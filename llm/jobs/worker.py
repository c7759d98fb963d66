"""Rows in any order and in any pieces, answered as one machine would answer them all.

An answer depends on its row alone: a row's seed follows from its `id`, or without one from its prompt, never from its
place in a piece. Of a file whose ids are the numbers of its rows, answers are those of `LLM.run`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from llm.base.types import JsonObject
from llm.calls.flow import Entry, Flow
from llm.engine.rows import AnyRow, RefusedRow, Row, derive_seed
from llm.jobs.identity import identity_of, row_key
from llm.jobs.journal import Ended, Partials, SharedJournal
from llm.jobs.requests import PlainRows, RowRequest
from llm.jobs.rows import Maker, Replies
from llm.jobs.tables import Read
from llm.output_formats import plain
from llm.outputs import RequestOutput

if TYPE_CHECKING:
    from llm.llm import LLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceRows(PlainRows):
    """Plain rows with an id, and with params of their own in a column `sampling_params`.

    Attributes:
        id_column: has the id; rows without it have none.
        seed: of the engine.
    """

    id_column: str
    seed: int

    def request(self, row: JsonObject) -> RowRequest:
        """Raises `ValidationError` for params that are wrong."""
        request = super().request(row)
        if request.params.seed is None:
            request = request._replace(params=dataclasses.replace(request.params, seed=self._seed(row, request)))
        return request

    def _seed(self, row: JsonObject, request: RowRequest) -> int:
        own = row.get(self.id_column)
        if isinstance(own, int) and not isinstance(own, bool) and own >= 0:
            return derive_seed(self.seed, 0, own)
        said = ["prompt", request.prompt, request.messages] if own is None else ["id", own]
        digest = hashlib.sha256(json.dumps([self.seed, *said], sort_keys=True, default=str).encode()).digest()
        return int.from_bytes(digest[:8], "little")


class RowWorker:
    """Answers pieces of a job, one after another.

    Args:
        journal: what other processes and earlier ones have answered; None: nothing is kept.
    """

    def __init__(self, llm: LLM, rows: PieceRows, on_too_long: str, journal: SharedJournal | None = None) -> None:
        self._llm = llm
        self._rows = rows
        self._maker = Maker(rows, on_too_long, 1)
        self._replies = Replies(llm._preprocessor)
        self._journal = journal
        self._identity = identity_of(llm)
        self._keys: dict[int, str] = {}  # of the rows in flight
        self._partials = Partials(journal, self._keys.get)

    def answers(self, given: Sequence[JsonObject]) -> list[JsonObject]:
        """The rows with their answers, in their order."""
        found: dict[int, Ended] = {}
        flow = Flow(self._llm, self._entries(given, found), on_step=self._after_step)
        try:
            for output in flow:
                self._keep(output, found)
        finally:
            self._partials.written.clear()
            if self._journal is not None:
                self._journal.flush()
        return [self._answer(row, found[index]) for index, row in enumerate(given)]

    def _answer(self, row: JsonObject, ended: Ended) -> JsonObject:
        return self._replies.line(self._rows, row, ended, "")[1]

    def _entries(self, given: Sequence[JsonObject], found: dict[int, Ended]) -> Iterator[list[Entry]]:
        if not given:
            return
        if self._journal is not None:
            self._journal.refresh()
        with self._llm._exclusive():
            rows = self._maker.make(
                self._llm,
                self._llm._open_engine(),
                [(index, Read(f"row {index}", row)) for index, row in enumerate(given)],
            )
        yield [row for row in rows if not self._is_answered(row, found)]

    def _is_answered(self, row: AnyRow, found: dict[int, Ended]) -> bool:
        """True if a journal has the row's answer; else the row continues from what there is of it."""
        key = self._keys[row.index] = row_key(row, self._identity)
        known = None if self._journal is None or isinstance(row, RefusedRow) else self._journal.answer(key)
        if known is None or not isinstance(row, Row):
            return False
        ended = known.ended()
        if ended is not None:
            found[row.index] = ended
            return True
        self._partials.written[row.index] = known.continued_by(row, self._llm._preprocessor.config.vocab_size)
        return False

    def _keep(self, output: RequestOutput, found: dict[int, Ended]) -> None:
        ended = found[output.index] = Ended(self._keys[output.index], output)
        if self._journal is not None and output.error is None:
            self._journal.keep(ended)
            self._journal.flush()

    def _after_step(self, flow: Flow) -> None:
        self._partials.after_step(flow.in_flight)


def plain_row(row: Mapping[str, object]) -> JsonObject:
    """A row of a table as Python's own values."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        # A table of dicts has the keys of all in each; content may be None beside tool_calls.
        return {str(name): _plain(item) for name, item in value.items() if item is not None or name == "content"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return _plain(value.tolist())
    return value if value is None or isinstance(value, str | int | float | bool) else plain(value)
