"""`vllm.attention`, as vLLM's documentation of CustomOp has it: re-exports, one module per path."""
