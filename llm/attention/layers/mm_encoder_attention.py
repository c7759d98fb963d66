"""`vllm.attention.layers.mm_encoder_attention`."""

from llm.layers.attention.mm_encoder import MMEncoderAttention

__all__ = ["MMEncoderAttention"]
