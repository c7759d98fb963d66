"""Mixtures of experts: the layer (`fused_moe.py`), how tokens choose (`router.py`), the arithmetic (`method.py`)."""

from llm.layers.moe.fused_moe import FusedMoE
from llm.layers.moe.method import ExpertsMethod, UnquantizedFusedMoEMethod
from llm.layers.moe.modular import FusedMoEExperts, FusedMoEModularMethod, FusedMoEPrepareAndFinalize
from llm.layers.moe.router import GateLinear, GroupedTopk, SparseMixer, TopKRouter
from llm.layers.moe.transformers_moe import TransformersFusedMoE

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
