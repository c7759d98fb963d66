"""`vllm.model_executor.layers.mamba.mamba_mixer2`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.mamba import MambaMixer2
from llm.layers.mamba.gated_norm import Mixer2RMSNormGated

__all__ = [
    "MambaMixer2",
    "Mixer2RMSNormGated",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
