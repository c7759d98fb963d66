"""A constructor call with the engine arguments that scripts tend to carry."""

import os

from llm import LLM, SamplingParams

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(
    **model,
    runner="generate",
    tokenizer_mode="auto",
    trust_remote_code=True,
    dtype="auto",
    quantization=None,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    distributed_executor_backend="mp",
    gpu_memory_utilization=0.5,
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    block_size=32,
    kv_cache_dtype="auto",
    enable_prefix_caching=True,
    enable_chunked_prefill=True,
    enforce_eager=True,
    async_scheduling=False,
    load_format="auto",
    generation_config="vllm",
    enable_lora=False,
    disable_log_stats=True,
    seed=0,
)
outputs = llm.generate(["The words of the prophet", "And the angel said"], SamplingParams(temperature=0, max_tokens=12))
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
