"""`vllm.model_executor.layers.layernorm`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.extra.gated_norm import RMSNormGated
from llm.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm

__all__ = [
    "GemmaRMSNorm",
    "LayerNorm",
    "RMSNorm",
    "RMSNormGated",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
