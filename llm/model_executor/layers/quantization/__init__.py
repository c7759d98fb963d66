"""`vllm.model_executor.layers.quantization`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.quantization.base import QuantizationConfig
from llm.quantization.registry import get_quantization_config, register_quantization_config

__all__ = [
    "QuantizationConfig",
    "get_quantization_config",
    "register_quantization_config",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
