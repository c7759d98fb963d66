"""Logits processors: the interface, the built-in ones, adapters for request-level callables, and loading."""

from llm.sampling.logits_processors.builtin import EndThinkingLogitsProcessor, NoRepeatNGramLogitsProcessor
from llm.sampling.logits_processors.interface import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    BatchUpdateBuilder,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    RemovedRequest,
    RequestLogitsProcessor,
    process_dict_updates,
)

__all__ = [
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "BatchUpdateBuilder",
    "EndThinkingLogitsProcessor",
    "LogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "NoRepeatNGramLogitsProcessor",
    "RemovedRequest",
    "RequestLogitsProcessor",
    "process_dict_updates",
]
