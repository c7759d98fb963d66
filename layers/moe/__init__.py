"""Mixtures of experts: the layer and its arithmetic (`fused_moe.py`), how tokens choose (`router.py`)."""

from llm.layers.moe.fused_moe import (
    ExpertsMethod,
    FusedMoE,
    FusedMoEExperts,
    FusedMoEModularMethod,
    FusedMoEPrepareAndFinalize,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
)
from llm.layers.moe.router import GateLinear, GroupedTopk, SparseMixer, TopKRouter

__all__ = [
    "ExpertsMethod",
    "FusedMoE",
    "FusedMoEExperts",
    "FusedMoEModularMethod",
    "FusedMoEPrepareAndFinalize",
    "GateLinear",
    "GroupedTopk",
    "SparseMixer",
    "TopKRouter",
    "TransformersFusedMoE",
    "UnquantizedFusedMoEMethod",
]
