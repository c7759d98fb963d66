"""`vllm.model_executor.layers.linear`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from llm.quantization.base import LinearMethodBase
from llm.quantization.unquantized import UnquantizedLinearMethod

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "LinearMethodBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "UnquantizedLinearMethod",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
