"""`vllm.model_executor.layers.fused_moe`: the layer of experts and the interface of its quantization methods."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.moe import (
    FusedMoE,
    FusedMoEModularMethod,
    FusedMoEPrepareAndFinalize,
    GateLinear,
    GroupedTopk,
    UnquantizedFusedMoEMethod,
)
from llm.quantization.base import FusedMoEMethodBase

__all__ = [
    "FusedMoE",
    "FusedMoEMethodBase",
    "FusedMoEModularMethod",
    "FusedMoEPrepareAndFinalize",
    "GateLinear",
    "GroupedTopk",
    "UnquantizedFusedMoEMethod",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
