"""`vllm.model_executor.layers.rotary_embedding.common`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.extra.rotary import ApplyRotaryEmb

__all__ = [
    "ApplyRotaryEmb",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
