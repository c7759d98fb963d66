"""Mixtures of experts: the layer (`fused_moe.py`), how tokens choose (`router.py`), the arithmetic (`method.py`)."""

from llm.layers.moe.fused_moe import FusedMoE
from llm.layers.moe.method import ExpertsMethod, UnquantizedFusedMoEMethod
from llm.layers.moe.router import GateLinear, GroupedTopk, SparseMixer, TopKRouter

__all__ = [
    "ExpertsMethod",
    "FusedMoE",
    "GateLinear",
    "GroupedTopk",
    "SparseMixer",
    "TopKRouter",
    "UnquantizedFusedMoEMethod",
]
