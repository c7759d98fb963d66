"""`vllm.exceptions`: a re-export. Errors are in `llm.errors`."""

from llm.errors import ValidationError as VLLMValidationError

__all__ = ["VLLMValidationError"]
