"""`vllm.v1.metrics.reader`: the classes of what `LLM.get_metrics` returns."""

from llm.outputs import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
