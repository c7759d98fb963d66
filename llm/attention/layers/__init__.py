"""`vllm.attention.layers`."""
