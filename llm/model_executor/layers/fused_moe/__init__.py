"""`vllm.model_executor.layers.fused_moe`: the interface of quantization methods; the layers are not here yet."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.quantization.base import FusedMoEMethodBase

__all__ = [
    "FusedMoEMethodBase",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
