"""Operations that no model here uses, for models of your own; most are plain PyTorch without a kernel.

Import them by vLLM's paths, `llm.model_executor.layers.*`: those stay when an operation moves out of this folder.
"""
