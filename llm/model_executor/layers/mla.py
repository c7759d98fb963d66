"""`vllm.model_executor.layers.mla`: latent attention with its projections."""

from llm.layers.attention.latent import MLAModules, MultiHeadLatentAttentionWrapper

__all__ = ["MLAModules", "MultiHeadLatentAttentionWrapper"]
