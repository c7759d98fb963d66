"""Attention: over a paged cache of keys and values, and of encoders."""

from llm.layers.attention.attention import Attention

__all__ = ["Attention"]
