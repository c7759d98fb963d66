"""Names of vLLM and of other libraries that do not exist here, each with what to do instead.

Owns the tables. A value completes a sentence: "LLM has no argument 'torch_dtype'; its name is dtype."
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
    "images": "images, audio and video are not read",
    "max_new_tokens": "pass sampling_params=SamplingParams(max_tokens=...)",
    "prompt": "its name is prompts",
    "prompt_token_ids": "pass [{'prompt_token_ids': ids}, ...], or the lists of ids themselves, as prompts",
    "stream": "use LLM.stream(prompt, sampling_params), which yields text as it comes, or llm.AsyncLLM",
}

_MEDIA = "images, audio and video are not read; describe them in the text"
# Keys of prompts that are not text -> what to do instead.
NOT_TEXT: dict[str, str] = {
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "media_io_kwargs", "mm_processor_kwargs"), _MEDIA),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "encoder-decoder models are not here; pass one 'prompt'"),
    "prompt_embeds": "embeddings are not taken; pass 'prompt_token_ids'",
}

# Arguments of calls that are accepted with a neutral value -> (the neutral values, what to do instead of others).
ASKS_NOTHING: dict[str, tuple[tuple[object, ...], str]] = {
    "chat_template_content_format": (("auto",), "text and parts of text are both taken, as the template needs them"),
    "mm_processor_kwargs": ((None, {}), "prompts are text, and nothing is processed"),
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
    "sleep": "close it with LLM.close() and build a new one later",
    "wake_up": "it never sleeps",
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

_ASYNC = "llm.AsyncLLM is the engine for asyncio, and asyncio has the rest"
_ENGINE = "an LLM drives its engine itself; pass all prompts to one call of LLM.generate"
_ONE_DEVICE = "an LLM runs in this process, on one device"
_ADAPTERS = "adapters are enabled by LLM(enable_lora=True), and llm.layers.lora adds them to a layer"
_EXPERTS = "a layer of experts is an llm.layers.moe.FusedMoE, and its router an llm.layers.moe.TopKRouter"
_MIXERS = "mixers are in llm.layers.attention.latent, llm.layers.linear_attention and llm.layers.mamba"
_ROPE = "make an llm.layers.rotary.RotaryEmbedding with RopeParameters, which computes every scaling"
_TEXT = "prompts are text or token ids"
_NO_MODEL = "no model here needs it; derive your own from llm.layers.custom_op.CustomOp"
_EXPERT_LAYERS = ("SharedFusedMoE FusedMoEConfig FusedMoEFactory RoutedExperts fused_experts fused_topk").split()
_MIXER_LAYERS = ("ChunkGatedDeltaRule MLAAttention SparseAttnIndexer StaticSinkAttention FusedRMSNormGated").split()
_ROPE_CLASSES = (
    "get_rope YaRNScalingRotaryEmbedding MRotaryEmbedding Llama3RotaryEmbedding DeepseekScalingRotaryEmbedding "
    "LinearScalingRotaryEmbedding DynamicNTKScalingRotaryEmbedding Phi3LongRoPEScaledRotaryEmbedding"
).split()
_OTHER_OPERATIONS = (
    "SituAndMul HpcRopeNorm MiniMaxText01RMSNormTP FusedMMInputNorm NemotronLayerNorm1P VitMropeSetup "
    "CustomQwen2Decoder"
).split()
_OWN = "it is vLLM's own; take what you need from it into your code"
_UTILITIES = (
    "cuda_device_count_stateless direct_register_custom_op get_ip get_open_port is_pin_memory_available "
    "set_default_torch_dtype"
).split()
_DISTRIBUTED = (
    "destroy_distributed_environment destroy_model_parallel get_pp_group get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size get_tp_group get_world_group init_distributed_environment "
    "initialize_model_parallel initialize_ray_cluster tensor_model_parallel_all_gather tensor_model_parallel_all_reduce"
).split()
# Names that code for vLLM imports from modules that exist here.
NAMES: dict[str, str] = {
    "EngineCore": _ENGINE,
    **dict.fromkeys(_EXPERT_LAYERS, _EXPERTS),
    **dict.fromkeys(_MIXER_LAYERS, _MIXERS),
    **dict.fromkeys(_ROPE_CLASSES, _ROPE),
    **dict.fromkeys(_OTHER_OPERATIONS, _NO_MODEL),
    **dict.fromkeys(("EmbedsPrompt", "ExplicitEncoderDecoderPrompt"), _TEXT),
    "DeviceCapability": "Platform.get_device_capability returns (major, minor)",
    "GuidedDecodingParams": "it has become StructuredOutputsParams, in vLLM too",
    "get_current_vllm_config": "a constructor asks llm.base.construction.construction()",
    **dict.fromkeys(_DISTRIBUTED, _ONE_DEVICE),
    **dict.fromkeys(("make_async", "merge_async_iterators"), _ASYNC),
    **dict.fromkeys(_UTILITIES, _OWN),
    "set_current_vllm_config": "operations are bound by llm.base.construction.constructing_for(platform, compilation)",
}

# Modules of vLLM, with `llm` for `vllm`.
MODULES: dict[str, str] = {
    "llm.attention.backends": "an attention backend is an llm.layers.attention.AttentionBackend",
    "llm.attention.layer": "Attention is in llm.model_executor.layers.attention",
    "llm.distributed.device_communicators": _ONE_DEVICE,
    "llm.engine.llm_engine": "LLMEngine is imported from llm",
    "llm.entrypoints.openai": "there is no server; LLM.chat and LLM.stream answer in this process",
    "llm.envs": "environment variables are in llm.config.env",
    "llm.lora.layers": _ADAPTERS,
    "llm.lora.models": _ADAPTERS,
    "llm.model_executor.layers.fla": _MIXERS,
    "llm.model_executor.layers.fused_moe.config": _EXPERTS,
    "llm.model_executor.layers.fused_moe.layer": _EXPERTS,
    "llm.model_executor.model_loader": "checkpoints are read by llm.loading",
    "llm.model_executor.models.*": "models are in llm.models, and register_model is imported from llm",
    "llm.multimodal": _TEXT,
    "llm.transformers_utils": "tokenizers and chat templates are in llm.tokenizer",
    "llm.utils.async_utils": _ASYNC,
    "llm.utils.torch_utils": _OWN,
    "llm.v1.core": "the scheduler and the blocks are in llm.engine",
    **dict.fromkeys(("llm.v1.engine.core", "llm.v1.engine.llm_engine"), _ENGINE),
    "llm.v1.worker": "the model runner is llm.runner.model_runner.ModelRunner",
    "llm.worker": "the model runner is llm.runner.model_runner.ModelRunner",
}
