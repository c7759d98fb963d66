"""Seconds by phase, in order: what `LLM.startup` shows.

Owns the one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter


class PhaseTimes(dict[str, float]):
    """Phase name -> seconds; times of a repeated phase are added up."""

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
