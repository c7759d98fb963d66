"""`vllm.v1.metrics`: see `llm.v1`."""
