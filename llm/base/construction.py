"""The model under construction: the platform its operations are bound for, which operations are on, and what it took.

A constructor reads it once; nothing reads it while a model computes.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from llm.base import system
from llm.config.compilation import CompilationConfig
from llm.platforms.interface import Platform


class WeightPlace:
    """Where packed weights are kept: in memory, where they were packed.

    `is_slow`: `fetch` should be called. `packs_early`: a layer is packed as soon as its tensors are read, so that
    memory holds one layer besides.
    """

    is_slow: ClassVar[bool] = False
    packs_early: ClassVar[bool] = False

    def divide(self, model: nn.Module, total: int) -> None:
        """The model whose weights come, of `total` bytes as planned."""

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to compute with, which holds the same values. `name`: the path of its layer."""
        return tensor

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are read next, and other weights of their layer are not."""

    def close(self) -> None:
        """All weights have come."""

    def where(self) -> str:
        """Where they are, as a sentence; "": in memory."""
        return ""

    def shared_bytes(self) -> int:
        """Of weights that other processes have in the same memory."""
        return 0


IN_MEMORY = WeightPlace()


@dataclass(frozen=True)
class Construction:
    """The settings that constructors read. `platform` None: an operation constructed outside of an LLM.

    `activations`: the type that embeddings give, and that every layer's result has.
    `may_round`: GEMMs may round their activations to bfloat16 where that is faster.
    `weights`: where packed weights are kept: `WeightFile` moves those into a file that memory has no room for, and
        `SharedWeights` those that other processes have too.
    `scratch`: for what is packed and then gone. It lives as long as a constructor's object refers to it.
    """

    platform: Platform | None = None
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    may_round: bool = False
    weights: WeightPlace = IN_MEMORY
    scratch: Scratch | None = None
    activations: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where weights are made: the platform's, and "meta" where a model is built for its shapes alone."""
        default = torch.get_default_device()
        return default if self.platform is None or default.type == "meta" else self.platform.device


# The one exception to "no module state": it is set only inside `constructing_for`, and a constructor reads it once.
_construction: ContextVar[Construction] = ContextVar("llm_construction", default=Construction())  # noqa: B039 (frozen)


@contextmanager
def constructing_for(
    platform: Platform,
    compilation: CompilationConfig | None = None,
    *,
    may_round: bool = False,
    weights: WeightPlace | None = None,
    activations: torch.dtype = torch.float32,
) -> Iterator[None]:
    """Operations constructed inside this context are bound for `platform`; those outside, to `forward_native`."""
    own = compilation or CompilationConfig(), may_round, weights or IN_MEMORY, Scratch(), activations
    token = _construction.set(Construction(platform, *own))
    try:
        yield
    finally:
        _construction.reset(token)


@contextmanager
def constructing_alone() -> Iterator[None]:
    """Inside this context operations are constructed as outside of a model: for `forward_native`, with no kernels."""
    token = _construction.set(Construction())
    try:
        yield
    finally:
        _construction.reset(token)


def construction() -> Construction:
    """The platform and the compilation config of the model under construction."""
    return _construction.get()


# Larger memory is not kept.
_MOST_KEPT = 256 << 20


class Scratch:
    """Memory for one tensor at a time: whoever asks while another tensor is alive gets memory of its own."""

    def __init__(self) -> None:
        self._kept: mmap.mmap | None = None
        self._taken: weakref.ref[np.ndarray] | None = None

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """int8 [rows, columns]."""
        size = rows * columns
        if size > _MOST_KEPT or (self._taken is not None and self._taken() is not None):
            return _tensor(np.frombuffer(system.mapped(size), np.int8, size), rows, columns)
        if self._kept is None or len(self._kept) < size:
            self._kept = None  # freed before more is taken
            self._kept = system.mapped(size)
        view = np.frombuffer(self._kept, np.int8, size)
        # The tensor's storage keeps the array alive, and nothing else does.
        self._taken = weakref.ref(view)
        return _tensor(view, rows, columns)


def _tensor(values: np.ndarray, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(values).view(rows, columns)


class PhaseTimes(dict[str, float]):
    """Phase name -> seconds, in order: what `LLM.startup` shows. Times of a repeated phase are added up."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + perf_counter() - started

    def add(self, others: Mapping[str, float]) -> None:
        """Add phases that were timed elsewhere."""
        for name, seconds in others.items():
            self[name] = self.get(name, 0.0) + seconds
