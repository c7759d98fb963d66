"""`vllm.logprobs`: a re-export. Logprobs are in `llm.outputs`."""

from llm.outputs import FlatLogprobs, Logprob

__all__ = ["FlatLogprobs", "Logprob"]
