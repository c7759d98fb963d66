"""`vllm.engine.async_llm_engine`: a re-export; in vLLM too `AsyncLLMEngine` is a name of `AsyncLLM`."""

from llm.api.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
