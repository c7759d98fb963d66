"""Drafts from a grammar: the tokens that an answer must go on with.

A grammar may allow forced text in other pieces than these, so they are verified like any drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm.engine.batch import InputBatch
from llm.engine.speculation.source import Offer, Source


@dataclass
class _Answer:
    """An answer that grows; `read` of its tokens are consumed by the `matcher`, None once it has failed."""

    matcher: Any
    read: int = 0
    forced: list[int] = field(default_factory=list)


class ForcedSource(Source):
    """Rows with a structure that llguidance computes. Each has a matcher of its own, besides the one of its masks."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}

    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        structure = batch.params[row].structure
        if structure is None or structure.grammar is None:
            return None
        name = batch.request_ids[row]
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _Answer(structure.matcher())
        _advance(answer, batch.output_token_ids[row])
        return Offer(min(most, len(answer.forced)), "forced by the grammar") if answer.forced else None

    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {row: self._answers[batch.request_ids[row]].forced[:count] for row, count in counts.items()}

    def forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def reset(self) -> None:
        self._answers.clear()


def _advance(answer: _Answer, output: Sequence[int]) -> None:
    """Read the new tokens; where the matcher is at one of its limits or the answer has ended, nothing is forced."""
    new, answer.read = output[answer.read :], len(output)
    if not new and answer.read:
        return
    answer.forced = []
    if answer.matcher is None:
        return
    if answer.matcher.try_consume_tokens(list(new)) < len(new) or answer.matcher.is_error():
        answer.matcher = None
    elif not answer.matcher.is_stopped():
        answer.forced = answer.matcher.compute_ff_tokens()
