"""`vllm.model_executor.custom_op`: what a replacement of an operation imports."""

from llm.layers.custom_op import CustomOp, PluggableLayer, op_registry, op_registry_oot

__all__ = ["CustomOp", "PluggableLayer", "op_registry", "op_registry_oot"]
