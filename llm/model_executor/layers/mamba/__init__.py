"""`vllm.model_executor.layers.mamba`."""
