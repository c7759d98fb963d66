"""`vllm.v1.sample.logits_processor.builtin`."""

from llm.sampling.logits_processors.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from llm.sampling.logits_processors.state import process_dict_updates

__all__ = ["LogitBiasLogitsProcessor", "MinPLogitsProcessor", "MinTokensLogitsProcessor", "process_dict_updates"]
