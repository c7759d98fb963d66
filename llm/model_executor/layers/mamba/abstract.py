"""`vllm.model_executor.layers.mamba.abstract`: the base of recurrent mixers."""

from llm.layers.mamba.parameters import MambaBase

__all__ = ["MambaBase"]
