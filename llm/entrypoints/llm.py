"""`vllm.entrypoints.llm`."""

from llm.api import LLM

__all__ = ["LLM"]
