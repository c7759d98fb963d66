"""`vllm.model_executor.layers.logits_processor`: the layer that computes logits from hidden states.

What changes logits has the same name in vLLM: `llm.v1.sample.logits_processor.LogitsProcessor`.
"""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.logits import LogitsLayer as LogitsProcessor

__all__ = [
    "LogitsProcessor",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
