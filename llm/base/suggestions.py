"""Names of vLLM and of other libraries that do not exist here, each with what to do instead.

A value completes a sentence: "LLM has no argument 'torch_dtype'; its name is dtype."
Modules and names that code for vLLM imports are in `llm.base.vllm_paths`.
"""

from __future__ import annotations

_STRUCTURED: dict[str, str] = {
    "response_format": "pass structured_outputs=StructuredOutputsParams(json=schema), or json_object=True",
    **{
        f"guided_{kind}": f"pass structured_outputs=StructuredOutputsParams({kind}=...)"
        for kind in ("json", "regex", "choice", "grammar", "json_object")
    },
    "guided_options_request": "pass structured_outputs=StructuredOutputsParams(...)",
    "json_schema": "pass structured_outputs=StructuredOutputsParams(json=schema)",
}
_TOOLS = "pass tools to LLM.chat, whose template shows them, and read outputs[0].tool_calls"
# Keyword arguments that no method of `LLM` has, apart from the fields of SamplingParams.
CALLS: dict[str, str] = {
    **{name: f"{instead} in SamplingParams" for name, instead in _STRUCTURED.items()},
    "images": "pass them with the prompt: {'prompt': text, 'multi_modal_data': {'image': image}}",
    "max_new_tokens": "pass sampling_params=SamplingParams(max_tokens=...)",
    "prompt": "its name is prompts",
    "prompt_token_ids": "pass [{'prompt_token_ids': ids}, ...], or the lists of ids themselves, as prompts",
    "stream": "use LLM.stream(prompt, sampling_params), which yields text as it comes, or llm.AsyncLLM",
}

# Keys of prompts that are not text -> what to do instead.
NOT_TEXT: dict[str, str] = {
    "media_io_kwargs": "pass what reading needs to Pillow yourself, and the image that it gives",
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "encoder-decoder models are not here; pass one 'prompt'"),
    "prompt_embeds": "embeddings are not taken; pass 'prompt_token_ids'",
}

# Arguments of calls that are accepted with a neutral value -> (the neutral values, what to do instead of others).
ASKS_NOTHING: dict[str, tuple[tuple[object, ...], str]] = {
    "chat_template_content_format": (("auto",), "text and parts of text are both taken, as the template needs them"),
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
    "skip_clone": "params are never changed here, so nothing has to be cloned",
    "stream_interval": "LLM.stream yields text as it comes",
    **_STRUCTURED,
    **dict.fromkeys(("tools", "tool_choice"), _TOOLS),
    "use_beam_search": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
    "watermarking": "text is not watermarked; write a logits processor that does it",
}

# Arguments that `StructuredOutputsParams` does not have.
STRUCTURED: dict[str, str] = {
    **{name: f"its name is {name.removeprefix('guided_')}" for name in _STRUCTURED if name.startswith("guided_")},
    "backend": "llguidance constrains; leave it out",
    "json_schema": "its name is json",
    "schema": "its name is json",
}

_ONE_CALL = "pass all prompts to one call of LLM.generate or LLM.chat"
# Attributes of vLLM's `LLM` that ours does not have.
METHODS: dict[str, str] = {
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _ONE_CALL),
    "get_world_size": "an LLM runs on one device",
    "shutdown": "its name is close",
}
# Arguments of other libraries' constructors -> the ones of `LLM`.
CONSTRUCTOR: dict[str, str] = {
    "torch_dtype": "its name is dtype",
    **dict.fromkeys(
        ("lora", "lora_path", "adapter", "merge"),
        "pass merge_lora=folder, or enable_lora=True and lora_request=LoRARequest(name, 1, folder) in each call",
    ),
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
    "n_threads": "its name is num_threads",
    "temperature": "it is a field of SamplingParams",
    "max_tokens": "it is a field of SamplingParams",
}
