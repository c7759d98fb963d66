"""The paths under which plugins written for vLLM find operations, layers and quantization: re-exports only.

    llm.model_executor.custom_op        CustomOp, PluggableLayer and their registries
    llm.model_executor.layers           activation attention conv fused_moe layernorm linear logits_processor mamba
                                        quantization rotary_embedding vocab_parallel_embedding

One module per path re-exports what is defined in `llm.layers`, `llm.quantization` and `llm.base`. What vLLM has at a
path and this package has not is told in a sentence, see `llm.config.elsewhere`.
"""
