"""A recorded program that runs for any number of tokens.

Owns `AnySize`, made of two recordings of the same computation for different numbers of tokens. An argument of a kernel
that both recordings have in common is a constant; one that is a multiple of the number of tokens in both is computed
before each run. Anything else, a different sequence of calls included, is refused: `NotRecordable`.
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from llm.kernels.backend import NotRecordable
from llm.kernels.cpu.program import Call, Program

_SLOT_BYTES = 8


class AnySize:
    """The calls of `large`, with the arguments that follow the number of tokens.

    Attributes:
        most: the most tokens that `run` takes: there is memory for so many.
    """

    def __init__(self, small: Program, large: Program) -> None:
        self.most = large.most
        self._replay = large.replay
        self._recorded = large  # owns the memory that the calls use
        self._slots = np.concatenate([np.frombuffer(call.slots, dtype=np.int64) for call in large.calls])
        self._places, self._factors = _that_follow(small, large, self._slots)
        self._calls = (Call * len(large.calls))()
        address = self._slots.ctypes.data
        for target, call in zip(self._calls, large.calls, strict=True):
            target.replay, target.slots, target.expected = call.address, address, call.result
            address += len(call.slots)

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, tokens: int) -> bool:
        """Run the calls for so many tokens; False if one refused its arguments, after which outputs are undefined."""
        if not 0 < tokens <= self.most:
            raise ValueError(f"a program for at most {self.most} tokens is not run for {tokens}")
        self._slots[self._places] = self._factors * tokens
        return self._replay(ctypes.addressof(self._calls), len(self._calls)) < 0


def _that_follow(small: Program, large: Program, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices into `slots` of what is a multiple of the number of tokens, the factors)."""
    kinds = [[(call.address, call.result) for call in program.calls] for program in (small, large)]
    if kinds[0] != kinds[1] or len(small.counts) != len(large.counts):
        raise NotRecordable("the kernels that are called depend on the number of tokens")
    pairs = zip(small.counts, large.counts, strict=True)
    if any(one != other and one * large.tokens != other * small.tokens for one, other in pairs):
        raise NotRecordable("a tensor's size is no multiple of the number of tokens")
    others = np.concatenate([np.frombuffer(call.slots, dtype=np.int64) for call in small.calls])
    here, there = _Blocks(large), _Blocks(small)
    places, factors = [], []
    for place in np.flatnonzero(slots != others).tolist():
        value, other = int(slots[place]), int(others[place])
        offset = here.offset(value)
        if offset is not None and offset == there.offset(other):
            continue
        factor, rest = divmod(value, large.tokens)
        if offset is not None or rest or factor * small.tokens != other:
            raise NotRecordable("an argument of a kernel is no multiple of the number of tokens")
        places.append(place)
        factors.append(factor)
    return np.array(places, dtype=np.intp), np.array(factors, dtype=np.int64)


class _Blocks:
    """The memory blocks of a program's pool, sorted."""

    def __init__(self, program: Program) -> None:
        self._blocks = sorted(program.blocks())
        self._starts = [start for start, _ in self._blocks]

    def offset(self, address: int) -> int | None:
        """Of `address` in its block; None if it is in none."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start, end = self._blocks[index]
        return address - start if address < end else None
