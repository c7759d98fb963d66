"""`vllm.model_executor.layers.attention`."""

from llm.layers.attention import Attention
from llm.layers.attention.mm_encoder import MMEncoderAttention

__all__ = ["Attention", "MMEncoderAttention"]
