"""What a journal says of each row: its answer, or the tokens that it has so far.

Owns reading the records in the order of the rows, although they were written in the order of ending. As a job never
runs far ahead of its first unfinished row, few records wait for their turn: memory does not grow with the journal.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from llm.base.types import JsonObject
from llm.engine.rows import Row
from llm.errors import JobError
from llm.outputs import RequestOutput
from llm.outputs_json import output_as_json
from llm.outputs_read import output_from_json


@dataclass(frozen=True)
class Ended:
    """A row that has ended.

    Attributes:
        key: see `llm.jobs.identity.row_key`.
        values: what a pooling model made of it, float32 [size]; None: it generated, or has an error.
    """

    key: str
    output: RequestOutput
    values: np.ndarray | None = None

    def record(self) -> JsonObject:
        """The journal's record."""
        record: JsonObject = {"i": self.output.index, "k": self.key, "o": output_as_json(self.output)}
        if self.values is not None:
            record["v"] = base64_of(self.values)
        return record


def base64_of(values: np.ndarray) -> str:
    """float32 in little-endian order, as OpenAI encodes vectors too."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


@dataclass
class Answer:
    """What is known of a row.

    Attributes:
        key: of the row; see `llm.jobs.identity.row_key`.
        output: as `llm.outputs_json` writes it; None: the row has not ended.
        tokens: of each completion, so far.
        values: of `Ended`, in base64; None: there are none.
    """

    key: str
    output: JsonObject | None = None
    tokens: list[list[int]] = field(default_factory=list)
    values: str | None = None

    def ended(self) -> Ended | None:
        """The row, if it has ended."""
        if self.output is None:
            return None
        values = None if self.values is None else np.frombuffer(base64.b64decode(self.values), dtype="<f4")
        return Ended(self.key, output_from_json(self.output, None), values)

    def continued_by(self, row: Row, vocab_size: int | None = None) -> list[int]:
        """Let a row continue after the tokens that it has; returns how many each completion has.

        Raises:
            JobError: they are not this row's.
        """
        highest = max((token for own in self.tokens for token in own), default=0)
        lowest = min((token for own in self.tokens for token in own), default=0)
        is_known = lowest >= 0 and (vocab_size is None or highest < vocab_size)
        if self.tokens and (len(self.tokens) != row.params.n or not is_known):
            raise JobError(
                f"the journal's record of the row {self.key[:12]} has tokens that are not of this row; delete the "
                "journal to start again."
            )
        row.known_outputs = self.tokens
        return [len(tokens) for tokens in self.tokens]

    def extend(self, parts: list[tuple[int, list[int]]]) -> None:
        """Add the tokens of a record. A part that starts after what is known follows a damaged line: it is left out."""
        if not self.tokens:
            self.tokens = [[] for _ in parts]
        if len(parts) != len(self.tokens):
            raise JobError(
                f"the journal's records of the row {self.key[:12]} are of {len(self.tokens)} and of {len(parts)} "
                "completions; delete the journal to start again."
            )
        for known, (start, tokens) in zip(self.tokens, parts, strict=True):
            if start <= len(known):
                known[start:] = tokens


class Answers:
    """The answers of a journal's records, taken by index in increasing order."""

    def __init__(self, records: Iterator[JsonObject]) -> None:
        self._records = records
        self._found: dict[int, Answer] = {}

    def take(self, index: int) -> Answer | None:
        """What is known of a row; None: nothing. Everything before it is forgotten."""
        while not self._has_ended(index):
            record = next(self._records, None)
            if record is None:
                break
            if record["i"] >= index:
                self._add(record)
        return self._found.pop(index, None)

    def _has_ended(self, index: int) -> bool:
        return index in self._found and self._found[index].output is not None

    def _add(self, record: JsonObject) -> None:
        answer = self._found.setdefault(record["i"], Answer(record["k"]))
        if "o" in record:
            answer.key, answer.output, answer.tokens = record["k"], record["o"], []
            answer.values = record.get("v")
        elif answer.output is None:
            answer.extend(record["p"])


class Partials:
    """Writes the further tokens of rows in flight, each token once.

    Attributes:
        written: by index, the number of tokens of each completion that the journal has.
    """

    def __init__(self) -> None:
        self.written: dict[int, list[int]] = {}

    def record(self, index: int, key: str, tokens: list[list[int]]) -> JsonObject | None:
        """The record of what is new in a row's tokens, None if nothing is."""
        starts = self.written.get(index, [0] * len(tokens))
        if not tokens or [len(own) for own in tokens] == starts:
            return None
        self.written[index] = [len(own) for own in tokens]
        parts = [[start, own[start:]] for start, own in zip(starts, tokens, strict=True)]
        return {"i": index, "k": key, "p": parts}
