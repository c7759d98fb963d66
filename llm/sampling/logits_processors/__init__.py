"""Logits processors: the interface, the built-in ones, adapters for request-level callables, and loading."""

from llm.sampling.logits_processors.adapter import AdapterLogitsProcessor, RequestLogitsProcessor
from llm.sampling.logits_processors.extra import EndThinkingLogitsProcessor, NoRepeatNGramLogitsProcessor
from llm.sampling.logits_processors.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    RemovedRequest,
)
from llm.sampling.logits_processors.state import BatchUpdateBuilder, process_dict_updates

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
