"""`vllm.model_executor.layers.quantization.input_quant_fp8`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.extra.quant_fp8 import QuantFP8

__all__ = [
    "QuantFP8",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
