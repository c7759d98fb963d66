"""`vllm.attention.layers.mm_encoder_attention`."""

from llm.layers.extra.mm_encoder import MMEncoderAttention

__all__ = ["MMEncoderAttention"]
