"""`vllm.model_executor.layers.mamba.mamba_mixer`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.mamba import MambaMixer

__all__ = [
    "MambaMixer",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
