"""Drafts from the request's own tokens: what followed the longest earlier occurrence of its last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm.engine.batch import InputBatch
from llm.engine.speculation.source import Offer, Source
from llm.engine.speculation.suffix_automaton import SuffixAutomaton


class NgramSource(Source):
    """Args:
    shortest: length of the shortest repeated suffix that is continued.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._automata: dict[str, SuffixAutomaton] = {}

    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        automaton = self._automata.get(batch.request_ids[row])
        if automaton is None:
            automaton = self._automata[batch.request_ids[row]] = SuffixAutomaton()
        for token in batch.token_ids[row, automaton.size : batch.num_tokens[row]].tolist():
            automaton.push(token)
        length = automaton.repeat_length
        if length < self._shortest:
            return None
        # Long repeats go on more often than short ones.
        return Offer(most, f"repeat of {'2 or 3' if length < 4 else '4 to 7' if length < 8 else '8 or more'}")

    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {row: self._continue(batch, row, count) for row, count in counts.items()}

    def forget(self, request_id: str) -> None:
        self._automata.pop(request_id, None)

    def reset(self) -> None:
        self._automata.clear()

    def _continue(self, batch: InputBatch, row: int, count: int) -> list[int]:
        """The `count` tokens after the earlier occurrence; where they reach the last token, they repeat from there."""
        start = self._automata[batch.request_ids[row]].repeat_end + 1
        size = int(batch.num_tokens[row])
        tokens: list[int] = batch.token_ids[row, start : min(size, start + count)].tolist()
        while len(tokens) < count:
            tokens.append(tokens[len(tokens) - (size - start)])
        return tokens
