"""Attention over a paged KV cache: the layer, and the interface of its backends."""

from llm.layers.attention.attention import Attention
from llm.layers.attention.backend import AttentionBackend, attention_backend

__all__ = ["Attention", "AttentionBackend", "attention_backend"]
