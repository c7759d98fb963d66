"""What `LLM.get_metrics` returns, under vLLM's names (`vllm.v1.metrics.reader`): plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metric:
    """`labels` tell metrics of one name apart."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counts in an order. No metric here is one; scripts import it."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """What is so now."""

    value: float


@dataclass
class Histogram(Metric):
    """How many values there were, their sum, and how many were at most each bound; the last bound is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]
