"""`vllm.lora`: scripts import `llm.lora.request.LoRARequest`."""
