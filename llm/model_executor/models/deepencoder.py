"""`vllm.model_executor.models.deepencoder`: attention of an image encoder."""

from llm.layers.extra.rel_pos import RelPosAttention

__all__ = ["RelPosAttention"]
