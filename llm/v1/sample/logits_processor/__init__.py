"""`vllm.v1.sample.logits_processor`: what a custom logits processor imports."""

from llm.plugins import LOGITS_PROCESSORS as LOGITSPROCS_GROUP
from llm.sampling.logits_processors import (
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
from llm.sampling.logits_processors.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from llm.sampling.logits_processors.pipeline import LogitsProcessors

__all__ = [
    "LOGITSPROCS_GROUP",
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "BatchUpdateBuilder",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "LogitsProcessors",
    "MinPLogitsProcessor",
    "MinTokensLogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "RemovedRequest",
    "RequestLogitsProcessor",
    "process_dict_updates",
]
