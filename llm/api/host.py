"""The type of `self` in the base classes of `LLM`.

Owns the protocol; `LLM` in `llm.api.facade` implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from llm.base.bar import UseTqdm
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.preprocess import Preprocessor
from llm.engine.rows import AnyRow
from llm.outputs import RequestOutput
from llm.sampling_params import SamplingParams


class Host(Protocol):
    """The attributes and methods of `LLM` that its base classes use."""

    _preprocessor: Preprocessor
    _may_have_changed: bool

    def _exclusive(self) -> AbstractContextManager[object]: ...
    def _begin(self) -> Engine: ...
    def _open_engine(self) -> Engine: ...
    def get_default_sampling_params(self) -> SamplingParams: ...
    def _run(
        self, engine: Engine, rows: Sequence[AnyRow], use_tqdm: UseTqdm, guard: InterruptGuard
    ) -> list[RequestOutput]: ...
