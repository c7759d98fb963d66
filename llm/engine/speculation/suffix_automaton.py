"""Where the last tokens of a sequence occurred before.

Owns a suffix automaton: the smallest automaton of all substrings, grown token by token (Blumer et al., "The smallest
automaton recognizing the subwords of a text", 1985). A token costs constant time on average, however long the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable


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
