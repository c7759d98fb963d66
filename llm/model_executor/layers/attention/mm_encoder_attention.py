"""`vllm.model_executor.layers.attention.mm_encoder_attention`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.extra.mm_encoder import MMEncoderAttention

__all__ = [
    "MMEncoderAttention",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
