"""`vllm.v1.engine.async_llm`."""

from llm.api.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
