"""`vllm.lora`: adapters are not applied; scripts import `llm.lora.request.LoRARequest` even so."""
