"""`vllm.exceptions`: a re-export. Errors are in `llm.base.errors`."""

from llm.base.errors import ValidationError as VLLMValidationError

__all__ = ["VLLMValidationError"]
