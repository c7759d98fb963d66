"""`vllm.v1.sample.logits_processor.builtin`."""

from llm.sampling.logits_processors.state import process_dict_updates

__all__ = ["process_dict_updates"]
