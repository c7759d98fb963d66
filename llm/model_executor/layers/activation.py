"""`vllm.model_executor.layers.activation`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.activation import (
    GELU,
    XIELU,
    GeluAndMul,
    GeluAndMulSparse,
    GELUTanh,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiluAndMul,
)
from llm.layers.extra.activation import (
    FastGELU,
    FatreluAndMul,
    MulAndSilu,
    SiluAndMulWithClamp,
    SwigluOAIAndMul,
    SwigluStepAndMul,
)

__all__ = [
    "GELU",
    "XIELU",
    "FastGELU",
    "FatreluAndMul",
    "GELUTanh",
    "GeluAndMul",
    "GeluAndMulSparse",
    "MulAndSilu",
    "NewGELU",
    "QuickGELU",
    "ReLUSquaredActivation",
    "SiluAndMul",
    "SiluAndMulWithClamp",
    "SwigluOAIAndMul",
    "SwigluStepAndMul",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
