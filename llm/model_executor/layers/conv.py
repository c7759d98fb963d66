"""`vllm.model_executor.layers.conv`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.extra.conv import Conv2dLayer, Conv3dLayer, ConvLayerBase

__all__ = [
    "Conv2dLayer",
    "Conv3dLayer",
    "ConvLayerBase",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
