"""Operations that no model here uses, for models of your own; most are a definition in PyTorch without a kernel.

Import them by vLLM's paths, `llm.model_executor.layers.*`: they do not move when a model comes that uses them.
"""
