"""The model under construction: which platform its operations are bound for, and how they are switched.

Owns the one context variable of the package. A constructor reads it once; nothing reads it while a model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from llm.config.compilation import CompilationConfig
from llm.platforms.interface import Platform


@dataclass(frozen=True)
class Construction:
    """What a constructor may want to know; `None`: no platform, as when an operation is made by hand.

    `may_round`: products with bfloat16 weights may read their activations rounded to bfloat16, where that is faster.
    """

    platform: Platform | None = None
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    may_round: bool = False


# The one exception to "no module state": it is set only inside `constructing_for`, and a constructor reads it once.
_construction: ContextVar[Construction] = ContextVar("llm_construction", default=Construction())  # noqa: B039 (frozen)


@contextmanager
def constructing_for(
    platform: Platform, compilation: CompilationConfig | None = None, *, may_round: bool = False
) -> Iterator[None]:
    """Operations constructed inside this context are bound for `platform`; outside of it, to `forward_native`."""
    token = _construction.set(Construction(platform, compilation or CompilationConfig(), may_round))
    try:
        yield
    finally:
        _construction.reset(token)


def construction() -> Construction:
    """The platform and the compilation config of the model under construction."""
    return _construction.get()
