"""The paths that code written for vLLM imports, with `llm` for `vllm`: thin re-exports, nothing is defined below here.

    llm.v1.sample.logits_processor            the interface of logits processors, the adapter and the built-in ones
    llm.v1.sample.logits_processor.interface  .builtin  .state
    llm.v1.metrics.reader                     the classes of what `LLM.get_metrics` returns

Elsewhere under their vLLM paths: `llm.sampling_params`, `llm.outputs`, `llm.config.VllmConfig`, `llm.inputs`,
`llm.logger`, `llm.platforms`.
"""
