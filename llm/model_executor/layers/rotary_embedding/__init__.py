"""`vllm.model_executor.layers.rotary_embedding`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.extra.rotary import ApplyRotaryEmb, DualChunkRotaryEmbedding
from llm.layers.rotary import RotaryEmbedding
from llm.layers.rotary import RotaryEmbedding as RotaryEmbeddingBase

__all__ = [
    "ApplyRotaryEmb",
    "DualChunkRotaryEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingBase",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
