"""`vllm.model_executor.layers.mamba.short_conv`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.mamba.short_conv import ShortConv

__all__ = [
    "ShortConv",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
