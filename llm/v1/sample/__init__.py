"""`vllm.v1.sample`: see `llm.v1`."""
