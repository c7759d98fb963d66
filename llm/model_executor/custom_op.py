"""`vllm.model_executor.custom_op`: what a replacement of an operation imports."""

from llm.base.custom_op import CustomOp, PluggableLayer
from llm.base.replacement import op_registry, op_registry_oot

__all__ = ["CustomOp", "PluggableLayer", "op_registry", "op_registry_oot"]
