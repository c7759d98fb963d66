"""`vllm.model_executor.layers.vocab_parallel_embedding`."""

from typing import TYPE_CHECKING

from llm.base.missing import missing_names
from llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from llm.quantization.unquantized import UnquantizedEmbeddingMethod

__all__ = [
    "ParallelLMHead",
    "UnquantizedEmbeddingMethod",
    "VocabParallelEmbedding",
]

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
