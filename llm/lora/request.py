"""`vllm.lora.request`."""

from llm.inputs import LoRARequest

__all__ = ["LoRARequest"]
