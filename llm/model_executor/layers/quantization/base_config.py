"""`vllm.model_executor.layers.quantization.base_config`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase

__all__ = [
    "QuantizationConfig",
    "QuantizeMethodBase",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
