"""Recording the kernel calls of one step, to replay them without Python.

A program repeats the same calls on the same addresses: what varies between runs must be written into its inputs before
a replay. A replay contains kernel calls only, so while a program is recorded PyTorch may allocate and make views but
not compute; elementwise.py replaces its few sums and products by kernels.

`AnySize` is made of two recordings of the same computation for different numbers of tokens. An argument of a kernel
that both recordings have in common is a constant; one that is a multiple of the number of tokens in both is computed
before each run. Anything else, a different sequence of calls included, is refused: `NotRecordable`.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm.kernels.backend import NotRecordable, PartFunction, PartResults, RecordedPart
from llm.kernels.cpu.elementwise import substitute
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.memory import Pool

T = TypeVar("T")

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
# Their results are always views.
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.transpose.int,
}
# Filled once, at recording: no call of a program writes into them.
_CONSTANTS = {
    torch.ops.aten.zeros.default: 0,
    torch.ops.aten.zeros_like.default: 0,
    torch.ops.aten.new_zeros.default: 0,
    torch.ops.aten.new_ones.default: 1,
    torch.ops.aten.ones_like.default: 1,
}


class Call(ctypes.Structure):
    """`Call` in replay.cpp."""

    _fields_ = (("replay", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("expected", ctypes.c_int64))


class RecordedCall(NamedTuple):
    """The kernel's address, its arguments in slots, and what it returned."""

    address: int
    slots: bytes
    result: int


class Part:
    """A `RecordedPart` of this backend; places are numbers of calls.

    Its tensors are borrowed: what is recorded behind it may use their memory again.
    """

    def __init__(
        self, first: int, last: int, arguments: Sequence[object], results: Sequence[torch.Tensor | None], most: int
    ) -> None:
        self.first, self.last = first, last
        self._arguments, self._results, self._cuts = arguments, results, most > 0

    def arguments(self, tokens: int) -> list[object]:
        return [self._cut(item, tokens) if isinstance(item, torch.Tensor) else item for item in self._arguments]

    def results(self, tokens: int) -> PartResults:
        return tuple(None if item is None else self._cut(item, tokens) for item in self._results)

    def _cut(self, tensor: torch.Tensor, tokens: int) -> torch.Tensor:
        return _first(tensor, tokens) if self._cuts else tensor


class Program:
    """Recorded calls; `run` repeats them.

    Args:
        tokens, most: how many tokens the recorded step has, and for how many its tensors are to have memory; 0: it is
            repeated as it is.
        like: a recording of the same step. Kernels are not run, and return what they returned there.

    Attributes:
        calls: in order.
        counts: with `tokens`, the elements of each tensor that was allocated, in order.
        parts: of what was recorded, by their keys.
    """

    def __init__(self, library: Library, tokens: int = 0, most: int = 0, like: Program | None = None) -> None:
        self.library = library
        self.tokens, self.most = tokens, most
        self._results = None if like is None else iter([call.result for call in like.calls])
        self.replay = library.function("llm_replay")
        self.calls: list[RecordedCall] = []
        self.counts: list[int] = []
        self.parts: dict[Hashable, Part] = {}
        self._constants: list[tuple[int, int]] = []
        self._compiled: Any = None
        # A replay uses the same addresses: no memory that was used may be freed.
        self._pool = Pool(sys.maxsize)
        self._owner = threading.get_ident()
        # Kept alive as long as the program: constants, and what the caller adds.
        self.kept: list[Any] = []
        self.refusal = ""  # the first operation that no replay would repeat

    def __len__(self) -> int:
        return len(self.calls)

    def run(self, first: int = 0, last: int | None = None) -> bool:
        """Replay the calls from number `first` to before number `last`, to the end if None; False if one refused its
        arguments, after which the outputs are undefined."""
        if self._compiled is None:
            compiled = [Call(call.address, _address(ctypes.c_char_p(call.slots)), call.result) for call in self.calls]
            self._compiled = (Call * len(compiled))(*compiled)
        return _replay(self.replay, self._compiled, first, last)

    def is_recording(self) -> bool:
        """True in the thread that records: another one computes as usual."""
        return threading.get_ident() == self._owner

    def call(self, entry: Any, slots: bytes) -> int:
        """Call a kernel and record the call; returns what it returned."""
        if not self.is_recording():
            return entry(slots)
        result = entry(slots) if self._results is None else next(self._results, None)
        if result is None:
            raise NotRecordable("the kernels that are called depend on the number of tokens")
        self.calls.append(RecordedCall(_address(entry), slots, result))
        return result

    def part(self, key: Hashable, function: PartFunction, arguments: Sequence[object]) -> PartResults:
        """See `Backend.record_part`."""
        if not self.is_recording():
            return function(*arguments)
        given, first = self._borrowed(arguments), len(self.calls)
        results = function(*arguments)
        returned = self._borrowed(results) if isinstance(results, tuple) else None
        if given is not None and returned is not None:
            self.parts[key] = Part(first, len(self.calls), given, returned, self.most)
        return results

    def _borrowed(self, items: Sequence[T]) -> list[T] | None:
        """The items, without holding the memory of tensors; None: a tensor has other rows than the step's tokens, or is
        no memory of the program's."""
        with torch._C._DisableTorchDispatch():
            found = [self._without_holding(item) if isinstance(item, torch.Tensor) else item for item in items]
        if any(own is None and item is not None for own, item in zip(found, items, strict=True)):
            return None
        return cast("list[T]", found)

    def _without_holding(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.tokens and len(tensor) != self.tokens:
            return None
        return tensor if self._is_constant(tensor) else self._pool.borrow(tensor)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self._constants)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the program's pool; its storage has room for `most` tokens."""
        count = math.prod(shape)
        # Each view would be dispatched to `_OnlyKernels`, which takes longer than all the rest.
        with torch._C._DisableTorchDispatch():
            return self._pool.empty((self._room(count),), dtype)[:count].view(shape)

    def constant(self, shape: torch.Size, dtype: torch.dtype, value: int) -> torch.Tensor:
        """As `empty`, filled: no call of a program writes into it."""
        count = math.prod(shape)
        whole = torch.full((self._room(count),), value, dtype=dtype)
        self.kept.append(whole)
        self._constants.append((whole.data_ptr(), whole.data_ptr() + whole.nbytes))
        return whole[:count].view(shape)

    def blocks(self) -> list[tuple[int, int]]:
        """(address, end) of each block of memory that its tensors use."""
        return self._pool.blocks() + self._constants

    def _room(self, count: int) -> int:
        """Elements of a tensor's storage, where the recorded step needs `count`."""
        self.counts.append(count)
        return count // self.tokens * self.most if self.tokens and count % self.tokens == 0 else count


def _replay(replay: Callable[[int, int], int], calls: ctypes.Array[Call], first: int, last: int | None) -> bool:
    count = (len(calls) if last is None else last) - first
    return replay(ctypes.addressof(calls) + first * ctypes.sizeof(Call), count) < 0


def _address(item: Any) -> int:
    return ctypes.cast(item, ctypes.c_void_p).value or 0


@contextmanager
def record(library: Library, tokens: int = 0, most: int = 0, like: Program | None = None) -> Iterator[Program]:
    """Record the kernel calls made inside the context as a program.

    Args:
        tokens, most, like: as of `Program`.

    Raises:
        NotRecordable: PyTorch computed something that has no kernel; at the end, so that what changes in place,
            recurrent states for example, has changed once.
    """
    program = Program(library, tokens, most, like)
    library.recorder = program
    try:
        with _no_collection(), _OnlyKernels(program):
            yield program
    finally:
        library.recorder = None
    if program.refusal:
        raise NotRecordable(program.refusal)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Finalizers of garbage that PyTorch computes in would be taken for a part of the step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _OnlyKernels(TorchDispatchMode):
    """Notes the first PyTorch operation that computes; allocations are made in the program's pool."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would make torch import its compiler at the first recording, which takes most of a second.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS:
            return func(*args, **(kwargs or {}))
        program = self._program
        own = substitute(program.library, func, args, kwargs, program.empty)
        if own is not None:
            return own
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            return program.empty(result.shape, result.dtype)
        if func in _CONSTANTS:
            return program.constant(result.shape, result.dtype, _CONSTANTS[func])
        if func._schema.is_mutable or not _are_views(result, (args, kwargs)):
            program.refusal = program.refusal or str(func)
        return result


def _are_views(result: Any, arguments: Any) -> bool:
    """True if all tensors of `result` share the arguments' memory: `to` or `reshape` may give a view or a copy."""
    given = {item.untyped_storage().data_ptr() for item in tree_leaves(arguments) if isinstance(item, torch.Tensor)}
    made = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
    return bool(made) and all(item.untyped_storage().data_ptr() in given for item in made)


class AnySize:
    """The calls of `large`, with the arguments that follow the number of tokens.

    Attributes:
        most: the most tokens that `run` takes: there is memory for so many.
        parts: as of `Program`.
    """

    def __init__(self, small: Program, large: Program) -> None:
        self.most, self.parts = large.most, large.parts
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

    def run(self, tokens: int, first: int = 0, last: int | None = None) -> bool:
        """As `Program.run`, for so many tokens."""
        if not 0 < tokens <= self.most:
            raise ValueError(f"a program for at most {self.most} tokens is not run for {tokens}")
        self._slots[self._places] = self._factors * tokens
        return _replay(self._replay, self._calls, first, last)


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


class Recorded:
    """A `Recording` of this backend; without a `program` it cannot be replayed."""

    def __init__(self, results: Sequence[torch.Tensor], program: Program | AnySize | None, refusal: str = "") -> None:
        self.results = results
        self.program = program
        self.refusal = refusal
        self.parts: Mapping[Hashable, RecordedPart] = {} if program is None else program.parts

    def run(self, tokens: int = 0, first: int = 0, last: int | None = None) -> Sequence[torch.Tensor] | None:
        if isinstance(self.program, AnySize):
            done = self.program.run(tokens, first, last)
            return [_first(item, tokens) for item in self.results] if done else None
        return self.results if self.program is not None and self.program.run(first, last) else None


def _first(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """The result for so many tokens, in the storage of the recorded one's."""
    return tensor.as_strided((tokens, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset())
