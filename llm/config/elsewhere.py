"""Names of vLLM and of other libraries that do not exist here, each with what to do instead.

Owns the tables. A value completes a sentence: "LLM has no argument 'torch_dtype'; its name is dtype."
"""

from __future__ import annotations

# Keyword arguments that no method of `LLM` has, beside the fields of SamplingParams.
CALLS: dict[str, str] = {
    "chat_template_content_format": "text and parts of text are both taken, as the template needs them; leave it out",
    "max_new_tokens": "pass sampling_params=SamplingParams(max_tokens=...)",
    "mm_processor_kwargs": "prompts are text; leave it out",
    "prompt": "its name is prompts",
    "prompt_token_ids": "pass [{'prompt_token_ids': ids}, ...], or the lists of ids themselves, as prompts",
    "stream": "use LLM.stream(prompt, sampling_params), which yields text as it comes",
    "tokenization_kwargs": "tokenize with LLM.get_tokenizer() and pass token ids, or use truncate_prompt_tokens",
}

# Arguments that `SamplingParams` does not have.
SAMPLING: dict[str, str] = {
    "best_of": "draw n completions with logprobs=0 and keep those of the largest cumulative_logprob",
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "early_stopping": "it is one of BeamSearchParams, for LLM.beam_search",
    "eos_token_id": "stop_token_ids ends at further ids, and ignore_eos goes on at the model's own",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "length_penalty": "it is one of BeamSearchParams, for LLM.beam_search",
    "max_length": "max_tokens limits what is generated, and LLM(max_model_len=...) prompt and output together",
    "num_beams": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
    "num_return_sequences": "its name is n",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 returns those of every token",
    "skip_clone": "params are never changed here, so nothing has to be cloned",
    "stream_interval": "LLM.stream yields text as it comes",
    "thinking_token_budget": "load EndThinkingLogitsProcessor, of llm.sampling.logits_processors",
    "use_beam_search": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
    "watermarking": "text is not watermarked; write a logits processor that does it",
}

_NO_POOLING = "only text generation is offered; use a library such as sentence-transformers"
_ONE_CALL = "pass all prompts to one call of LLM.generate or LLM.chat"
# Attributes of vLLM's `LLM` that ours does not have.
METHODS: dict[str, str] = {
    **dict.fromkeys(("embed", "encode", "classify", "reward"), _NO_POOLING),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _ONE_CALL),
    "score": f"{_NO_POOLING}, or LLM.loglikelihood for how likely a text is",
    "sleep": "close it with LLM.close() and build a new one later",
    "wake_up": "it never sleeps",
    "get_metrics": "LLM.stats counts steps, tokens and seconds",
    "start_profile": "wrap the call in torch.profiler",
    "stop_profile": "wrap the call in torch.profiler",
    "llm_engine": "the engine is driven by LLM's methods alone",
    "model_config": "it is LLM.config.model_config",
    "collective_rpc": "there are no workers; the model is in this process",
    "apply_model": "there are no workers; the model is in this process",
    "get_world_size": "an LLM runs on one device",
    "shutdown": "its name is close",
}
# Arguments of other libraries' constructors -> the ones of `LLM`.
CONSTRUCTOR: dict[str, str] = {
    "torch_dtype": "its name is dtype",
    "model_name": "its name is model",
    "model_path": "its name is model",
    "model_id": "its name is model",
    "pretrained_model_name_or_path": "its name is model",
    "device_map": "its name is device",
    "n_ctx": "its name is max_model_len",
    "max_seq_len": "its name is max_model_len",
    "max_length": "its name is max_model_len",
    "load_in_8bit": "pass quantization='w8a8'",
    "load_in_4bit": "pass quantization='w4a16'",
    "n_threads": "threads are PyTorch's; call torch.set_num_threads(n)",
    "num_threads": "threads are PyTorch's; call torch.set_num_threads(n)",
    "temperature": "it is a field of SamplingParams",
    "max_tokens": "it is a field of SamplingParams",
}
