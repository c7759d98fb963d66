"""Attention: over a paged cache of keys and values, and of encoders."""

from llm.layers.attention.attention import Attention
from llm.layers.attention.backend import AttentionBackend, attention_backend

__all__ = ["Attention", "AttentionBackend", "attention_backend"]
