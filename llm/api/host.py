"""The type of `self` in the base classes of `LLM`.

Owns the protocol; `LLM` in `llm.api.facade` implements it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from llm.base.bar import UseTqdm
from llm.engine.engine import Engine
from llm.engine.interrupt import InterruptGuard
from llm.engine.preprocess import Preprocessor, Row
from llm.outputs import RequestOutput


class Host(Protocol):
    """The attributes and methods of `LLM` that its base classes use."""

    _preprocessor: Preprocessor

    def _exclusive(self) -> AbstractContextManager[object]: ...
    def _begin(self) -> Engine: ...
    def _open_engine(self) -> Engine: ...
    def _run(
        self, engine: Engine, rows: list[Row], use_tqdm: UseTqdm, guard: InterruptGuard
    ) -> list[RequestOutput]: ...
