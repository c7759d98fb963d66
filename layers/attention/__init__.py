"""Attention over a paged KV cache: the layers, and the interface of their backends."""

from llm.layers.attention.attention import Attention
from llm.layers.attention.backend import AttentionBackend, attention_backend
from llm.layers.attention.latent import LatentAttention, MLAModules, MultiHeadLatentAttentionWrapper

__all__ = [
    "Attention",
    "AttentionBackend",
    "LatentAttention",
    "MLAModules",
    "MultiHeadLatentAttentionWrapper",
    "attention_backend",
]
