"""`vllm.v1.sample.logits_processor.state`."""

from llm.sampling.logits_processors.state import BatchUpdateBuilder

__all__ = ["BatchUpdateBuilder"]
