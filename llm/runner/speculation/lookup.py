"""Drafts from what is known without a model: what followed the last tokens before, and what a grammar forces.

The first are found by a suffix automaton: the smallest automaton of all substrings, grown token by token (Blumer et
al., "The smallest automaton recognizing the subwords of a text", 1985). A token costs constant time on average, however
long the sequence. A grammar may allow forced text in other pieces than the drafted ones, so they are verified like any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm.runner.batch import InputBatch
from llm.runner.speculation.proposer import Offer, Source


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


class ForcedSource(Source):
    """Rows with a structure that llguidance computes. Each has a matcher of its own, besides the one of its masks."""

    def __init__(self) -> None:
        self._answers: dict[str, _GrammarState] = {}

    def offer(self, batch: InputBatch, row: int, most: int) -> Offer | None:
        structure = batch.params[row].structure
        if structure is None or structure.grammar is None:
            return None
        name = batch.request_ids[row]
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _GrammarState(structure.matcher())
        _advance(answer, batch.output_token_ids[row])
        return Offer(min(most, len(answer.forced)), "forced by the grammar") if answer.forced else None

    def draft(self, batch: InputBatch, counts: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        return {row: self._answers[batch.request_ids[row]].forced[:count] for row, count in counts.items()}

    def forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def reset(self) -> None:
        self._answers.clear()


@dataclass
class _GrammarState:
    """An answer that grows; `read` of its tokens are consumed by the `matcher`, None once it has failed."""

    matcher: Any
    read: int = 0
    forced: list[int] = field(default_factory=list)


def _advance(answer: _GrammarState, output: Sequence[int]) -> None:
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


class SuffixAutomaton:
    """All substrings of the tokens so far.

    A state stands for the substrings that end at the same places. `_link[state]` is the state of its longest suffix
    that also ends elsewhere, `_length[state]` its longest substring's length, `_end[state]` the index of the last token
    of an occurrence.

    Attributes:
        size: number of tokens.
        repeat_length: length of the longest suffix that also occurs before; 0: the last token is new.
        repeat_end: index of the last token of that occurrence, the latest that was itself a longest repeated suffix, or
            else the first.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.size = self.repeat_length = 0
        self.repeat_end = -1
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]
        self._last = 0
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        following, link = self._next, self._link
        new = self._add({}, self._length[self._last] + 1, self.size)
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        repeated = link[new] = 0 if state < 0 else self._split(state, token)
        self.repeat_length, self.repeat_end = self._length[repeated], self._end[repeated]
        # Text that repeats goes on where it went on lately.
        self._end[repeated] = self.size
        self._last = new
        self.size += 1

    def _split(self, state: int, token: int) -> int:
        """The state after `token` from `state`, without the substrings that are longer than that."""
        following, link, length = self._next, self._link, self._length
        target = following[state][token]
        if length[target] == length[state] + 1:
            return target
        clone = self._add(dict(following[target]), length[state] + 1, self._end[target])
        link[clone], link[target] = link[target], clone
        while state >= 0 and following[state].get(token) == target:
            following[state][token] = clone
            state = link[state]
        return clone

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1
