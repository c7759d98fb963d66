"""What happens to every constructor argument of vLLM's `LLM`: it is honoured, accepted, or refused.

`ARGUMENTS` has the names that `vllm.LLM(...)` takes: its parameters, every `EngineArgs` field of 0.32 and 0.33, and a
few that older scripts still use. Calls of the methods of `LLM` are checked here too. `python -m llm.config.arguments`
prints the tables of docs/reference/differences.md.

The rule: an argument that cannot change the answers of one process on one device is ACCEPTED, with a note under
`verbose`. One that would change them, or that the caller relies on, is REFUSED, except at the values that ask for
nothing, vLLM's default among them. Nothing is ignored silently.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from llm import sampling_params
from llm.base import suggestions
from llm.errors import ArgumentError, ValidationError, nearest
from llm.sampling_params import SamplingParams

_SCHEDULING = "scheduling here is set by max_num_seqs and max_num_batched_tokens alone."


@dataclass(frozen=True)
class Argument:
    """What happens to one constructor argument.

    Attributes:
        status: "honoured" (a parameter of our `LLM`), "accepted" (changes no answer, or says what a parameter
            says too) or "refused".
        note: one sentence; for "accepted" why it is harmless, for "refused" why and, after a semicolon, what to do
            instead; "" for "honoured".
        harmless: for "refused", the values that ask for nothing and are accepted.
    """

    status: Literal["honoured", "accepted", "refused"]
    note: str
    harmless: tuple[object, ...] = ()


def _honoured(names: str) -> dict[str, Argument]:
    return {name: Argument("honoured", "") for name in names.split()}


def _accepted(note: str, names: str) -> dict[str, Argument]:
    return {name: Argument("accepted", note) for name in names.split()}


def _refused(note: str, **harmless: object) -> dict[str, Argument]:
    """Each keyword is an argument's name with its harmless value, or a tuple of several."""
    return {
        name: Argument("refused", note, values if isinstance(values, tuple) else (values,))
        for name, values in harmless.items()
    }


_UNSET: tuple[object, ...] = (None, {})

_GROUPS: tuple[dict[str, Argument], ...] = (
    # --- Parameters of our LLM; device, devices, calibration, requantize, num_threads, offload_weights, merge_lora,
    # prefix_cache and verbose are not vLLM's.
    _honoured("model tokenizer revision hf_overrides load_format skip_tokenizer_init chat_template"),
    _honoured(
        """dtype quantization device compilation_config enforce_eager logits_processors generation_config
        override_generation_config reasoning_config speculative_config""",
    ),
    _honoured("max_model_len max_num_seqs max_num_batched_tokens block_size max_logprobs logprobs_mode seed"),
    _honoured("kv_cache_memory_bytes kv_cache_dtype enable_prefix_caching enable_chunked_prefill"),
    _honoured("mamba_block_size"),
    _honoured("model_impl use_tqdm_on_load calibration requantize"),
    _honoured("data_parallel_size devices"),
    _honoured("num_threads offload_weights verbose runner convert pooler_config"),
    _accepted("`RequestOutput.metrics`, `stats()` and `get_metrics()` are always there.", "disable_log_stats"),
    # --- Where the model and its tokenizer come from. --------------------------------------------------------------
    _accepted("code from a model folder is never run, whatever the value.", "trust_remote_code code_revision"),
    _accepted(
        "safetensors files are memory-mapped and read in one stream, and PyTorch files are not loaded at all.",
        """safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config pt_load_map_location max_parallel_loading_workers""",
    ),
    _refused("only Hugging Face's config format is read; leave it at 'auto'.", config_format=("auto", "hf")),
    _refused(
        "config.json is read from the model's own folder; put the file there, or change single keys with hf_overrides.",
        hf_config_path=None,
    ),
    _refused(
        "only Hugging Face tokenizers are read, tokenizer.json for 'mistral' too, which has the tokens of tekken.json; "
        "leave it at 'auto' and name another one with tokenizer.",
        tokenizer_mode=("auto", "hf", "mistral"),
    ),
    _refused(
        "the tokenizer's revision is not chosen apart from the model's; pass a local folder as tokenizer.",
        tokenizer_revision=None,
    ),
    _refused(
        "object storage is not read; copy the files into a folder and pass that as model.", model_weights=("", None)
    ),
    _refused("the hub's own cache is used; set HF_HUB_CACHE in the environment.", download_dir=None),
    _refused("no token is taken here; set HF_TOKEN in the environment or run `hf auth login`.", hf_token=(None, True)),
    _refused(
        "the checkpoint's index decides which files are read; pass a local folder that holds only the files you want.",
        ignore_patterns=("original/**/*", ["original/**/*"], [], None),
    ),
    _refused(
        "models come from this library's own registry; add a class with register_model.",
        model_class_overrides=_UNSET,
    ),
    # --- What the engine is asked to compute. ----------------------------------------------------------------------
    _accepted("it is vLLM's old word for runner and convert, which it sets.", "task"),
    _refused("prompts are text or token ids; pass {'prompt_token_ids': [...]}.", enable_prompt_embeds=False),
    _refused(
        "the endpoint reads texts too; pass skip_tokenizer_init=True to work in token ids here.", tokens_only=False
    ),
    _refused("there are no settings beside the scheme; pass its name as quantization.", quantization_config=_UNSET),
    _accepted("it lifts a check that is not made here.", "allow_deprecated_quantization"),
    _refused(
        "every layer stores its cache in one type; pass kv_cache_dtype='auto', which keeps the checkpoint's.",
        kv_cache_dtype_skip_layers=([], None),
    ),
    _refused(
        "recurrent states are float32: rounding them would make answers depend on a prompt's chunks; leave it out.",
        mamba_cache_dtype=("auto", "float32"),
        mamba_ssm_cache_dtype=("auto", "float32"),
        enable_mamba_cache_stochastic_rounding=False,
        mamba_config=_UNSET,
    ),
    _refused(
        "a model's sliding window is always computed; set max_model_len to the window's size.",
        disable_sliding_window=False,
    ),
    _refused("attention is computed one way on each platform; leave it out.", attention_config=_UNSET),
    _refused("n-gram embedding tables are not supported; leave it out.", engram_config=None),
    _refused("diffusion language models are not supported; use an autoregressive one.", diffusion_config=None),
    # --- Sampling. -------------------------------------------------------------------------------------------------
    _refused("random draws have one precision here; leave it out.", use_fp64_gumbel=False),
    _refused("draws cannot be forced; write a logits processor that allows one token.", enable_trace_replay=False),
    _refused("the set that was drawn from is not returned; ask for logprobs.", return_sampling_mask=False),
    _refused(
        "expert choices and other side outputs are not returned; use a forward hook of your own.",
        enable_return_routed_experts=False,
        aux_output_config=_UNSET,
    ),
    _refused(
        "llguidance constrains, JSON is compact; leave it out and use SamplingParams(structured_outputs=...).",
        structured_outputs_config=(*_UNSET, {"backend": "auto"}, {"backend": "guidance"}),
        guided_decoding_backend=("auto", None),
    ),
    _refused("text is not watermarked; write a logits processor that does it.", watermark_config=None),
    _refused(
        "drafts are set in one place; pass speculative_config={'method': ..., 'num_speculative_tokens': ...}.",
        spec_method=None,
        spec_model=None,
        spec_tokens=None,
    ),
    _accepted("RequestOutput.metrics always counts drafted and accepted tokens.", "per_request_spec_decode_metrics"),
    _accepted(
        "the chat template says how a reply marks its reasoning, and LLM.chat reads it out.",
        "reasoning_parser reasoning_parser_plugin",
    ),
    # --- Adapters. -------------------------------------------------------------------------------------------------
    _honoured("enable_lora max_loras max_lora_rank merge_lora prefix_cache"),
    _honoured("profiler_config"),
    _accepted("adapters are kept in the memory that they compute in, max_loras of them.", "max_cpu_loras"),
    _accepted(
        "it changes how a GPU computes adapters, not what.",
        """fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
        enable_tower_connector_lora max_lora_cls_labels""",
    ),
    _refused("an adapter is kept in the type that it is stored in; leave it at 'auto'.", lora_dtype="auto"),
    _refused("an adapter changes the modules that it has tensors for; leave it out.", lora_target_modules=None),
    _refused("adapters are chosen per row; pass lora_request.", default_mm_loras=_UNSET),
    # --- Images. Audio and video are refused where a prompt carries some. ------------------------------------------
    _honoured("limit_mm_per_prompt allowed_local_media_path mm_processor_kwargs"),
    _refused("the language model always runs; use a library for image encoders.", mm_encoder_only=False),
    _refused("there are no input and output plugins; convert data in your own code.", io_processor_plugin=None),
    _accepted(
        "a vision tower is read when the first image comes, pictures are processed in threads of this process, and "
        "nothing is fetched from a network.",
        """allowed_media_domains language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize skip_mm_profiling video_pruning_rate video_pruning_method
        disable_chunked_mm_input enable_mm_processor_stats ec_manager_config renderer_num_workers
        enable_shm_tensor_arena""",
    ),
    # --- Memory. ---------------------------------------------------------------------------------------------------
    _accepted(
        "the KV cache is sized from the memory that is free; set kv_cache_memory_bytes to size it yourself.",
        "gpu_memory_utilization num_gpu_blocks_override",
    ),
    _accepted(
        "a sequence that loses its blocks is computed again, so nothing is swapped or offloaded.",
        "kv_offloading_size kv_offloading_backend swap_space",
    ),
    _refused(
        "weights stay on one device; use quantization to make them fit, or device='cpu' with offload_weights.",
        cpu_offload_gb=0,
        cpu_offload_params=(set(), [], None),
        offload_group_size=0,
        offload_params=(set(), [], None),
    ),
    _accepted(
        "no weights go from one device to another, so how makes no difference.",
        "offload_backend offload_num_in_group offload_prefetch_step",
    ),
    _accepted("sleep() and wake_up() need no setting.", "enable_sleep_mode"),
    _accepted(
        "memory is the platform's allocator's, awake or asleep.",
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend",
    ),
    _accepted(
        "prefix blocks are hashed with SHA-256, their tokens compared on a hit, the least recently used dropped first.",
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit swa_bounded_replay",
    ),
    _accepted(
        "each group of layers manages the cache that its model declares.",
        """disable_hybrid_kv_cache_manager kv_sharing_fast_prefill mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm""",
    ),
    # --- Scheduling: the order of the work, never the answers. -----------------------------------------------------
    _accepted(
        _SCHEDULING,
        """max_num_active_seqs max_num_scheduled_tokens long_prefill_token_threshold
        long_prefill_token_threshold_adaptive scheduler_reserve_full_isl prefill_schedule_interval watermark""",
    ),
    _honoured("async_scheduling"),
    _accepted(_SCHEDULING, "num_scheduler_steps use_v2_block_manager"),
    _accepted("a call runs all of its prompts and has no queue to limit.", "max_num_queued_reqs max_num_queued_tokens"),
    _accepted("LLM.stream yields text as it comes, and LLM.generate yields none before the end.", "stream_interval"),
    _honoured("scheduling_policy"),
    _refused("the scheduler cannot be replaced; set max_num_seqs and max_num_batched_tokens.", scheduler_cls=None),
    # --- Kernels and compilation. ----------------------------------------------------------------------------------
    _accepted(
        "no graph is captured and nothing is compiled ahead of time.",
        """cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture optimization_level performance_mode
        enable_flashinfer_autotune jit_monitor_mode jit_monitor_verbose""",
    ),
    _accepted(
        "the platform chooses the kernels, and compilation_config can ask for plain PyTorch in their place.",
        """attention_backend moe_backend linear_backend sparse_indexer_topk_backend mamba_backend mamba_ssu_algorithm
        mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend kda_decode_backend disable_cascade_attn
        ir_op_priority kernel_config""",
    ),
    # --- More than one device, more than one process. --------------------------------------------------------------
    _honoured("tensor_parallel_size"),
    _refused(
        "no process has some of the layers; use tensor_parallel_size, where each has a part of every layer.",
        pipeline_parallel_size=1,
    ),
    _accepted("ranks have whole experts, by their ids, whatever the value.", "enable_expert_parallel"),
    _refused(
        "an LLM has no part in another's; use data_parallel_size on one machine, and shards or Ray on several.",
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        nnodes=1,
        node_rank=0,
        data_parallel_rank=(None, 0),
        data_parallel_start_rank=(None, 0),
        data_parallel_size_local=(None, 1),
    ),
    _refused("devices have names; choose one with device, or one for each replica with devices.", device_ids=None),
    _honoured("distributed_executor_backend"),
    _refused(
        "workers are this package's own; add models with register_model and devices with a platform plugin.",
        worker_cls="auto",
        worker_extension_cls=("", None),
    ),
    _refused("a platform plugin is not handed options; let it read its own settings.", additional_config=_UNSET),
    _refused(
        "nothing leaves this process; leave it out, and move data with your own code.",
        kv_transfer_config=_UNSET,
        kv_events_config=_UNSET,
        ec_transfer_config=_UNSET,
        weight_transfer_config=_UNSET,
    ),
    _accepted(
        "it concerns several devices or processes, and there is one of each.",
        """master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds data_parallel_address
        data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb dp_sync_interval disable_nccl_for_dp_synchronization
        disable_custom_all_reduce all2all_backend dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size enable_ep_weight_filter expert_placement_strategy enable_eplb eplb_config
        enable_elastic_ep elastic_ep_max_dp_size enable_hc_sp enable_batch_sharded_sampling enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold enable_fault_tolerance fault_tolerance_config
        shutdown_timeout _api_process_count _api_process_rank""",
    ),
    _accepted(
        "devices='all' gives each NUMA node a replica; one process binds nothing, start Python under numactl to do so.",
        "numa_bind numa_bind_nodes numa_bind_cpus",
    ),
    # --- Logs, metrics, traces. ------------------------------------------------------------------------------------
    _accepted(
        "LLM.stats(), get_metrics() and RequestOutput.metrics always count; nothing is logged.",
        """aggregate_engine_logging enable_logging_iteration_details log_level log_config_file logging_config
        show_hidden_metrics_for_version custom_histogram_buckets kv_cache_metrics kv_cache_metrics_sample
        cudagraph_metrics enable_mfu_metrics""",
    ),
    _accepted("it names the model for requests over HTTP: `python -m llm serve` takes it.", "served_model_name"),
    _accepted("environment variables are always checked.", "fail_on_environ_validation"),
    _refused(
        "no traces are written or sent; wrap the call in torch.profiler.",
        otlp_traces_endpoint=None,
        collect_detailed_traces=(None, []),
        enable_layerwise_nvtx_tracing=False,
        ray_workers_use_nsight=False,
    ),
    # --- Dropped by vLLM, still in older scripts (swap_space, task and four more stand above). --------------------
    _refused(
        "vLLM has dropped it and config.json decides; change it with hf_overrides.", rope_scaling=None, rope_theta=None
    ),
)

ARGUMENTS: dict[str, Argument] = {name: argument for group in _GROUPS for name, argument in group.items()}

# Honoured arguments with another default than vLLM's, or a wider meaning.
DIFFERENT: dict[str, str] = {
    "model": "without one, the embedded model",
    "dtype": '"auto" keeps the weights as they are stored and computes in float32; vLLM: float32 becomes bfloat16',
    "quantization": 'also "w8a8", "w8a16", "w4a8", "w4a16" or a dict: an ordinary checkpoint is quantized',
    "max_logprobs": "-1, no limit; vLLM: 20",
    "max_num_batched_tokens": "512; vLLM's CPU build: 4096",
    "block_size": "16; vLLM's CPU build: 128",
    "kv_cache_dtype": '"auto": the dtype that was given, else that of the weights; vLLM: the one it computes in. '
    '"int8" and "fp8" (e4m3) have a scale per token and KV head, as vLLM\'s "int8_per_token_head"',
    "kv_cache_memory_bytes": "None takes what can be used, at most half of the memory that is free",
    "seed": "rows derive their own seeds from it and record them; None draws one",
    "hf_overrides": "None as the value of a key removes it",
    "model_impl": '"native" (or "vllm") and "transformers" as well; "auto" takes the native class if there is one',
    "speculative_config": '"auto" chooses; "ngram", "draft_model", "mtp" and "eagle3"; `llm.config.SpeculativeConfig`',
    "load_format": '"auto", "safetensors" or "dummy"; nothing else is read',
    "compilation_config": "switches operations on and off; no graph is captured",
    "max_loras": "4; vLLM: 1",
    "device, devices, num_threads, calibration, requantize, offload_weights, merge_lora": "not vLLM's; see `LLM`",
    "verbose": "not vLLM's; logs all decisions",
    "prefix_cache": "not vLLM's; a folder of `LLM.save_prefix_cache`",
}


# Keyword arguments that methods do not have -> what to do instead; see `llm.base.checks`.
CALLS: dict[str, str] = {
    **{
        item.name: f"it is a field of SamplingParams: pass sampling_params=SamplingParams({item.name}=...)"
        for item in fields(SamplingParams)
    },
    **suggestions.CALLS,
}

_HONOURED = [name for name, argument in ARGUMENTS.items() if argument.status == "honoured"]
_SECRETS = frozenset({"hf_token"})  # never shown in a message


def check_arguments(extra: Mapping[str, object]) -> list[str]:
    """Check constructor arguments that are no parameter of `LLM`.

    Returns:
        One note per accepted argument, "name: why it changes nothing", shown under `verbose`.

    Raises:
        ValidationError: a refused value.
        ArgumentError: a name that neither vLLM nor this library has.
        TypeError: an honoured name, which `LLM` should have as a parameter: a bug here, not the user's mistake.
    """
    return [note for name, value in extra.items() if (note := _judge(name, value))]


def _judge(name: str, value: object) -> str:
    """The note for one argument, "" when there is none."""
    argument = ARGUMENTS.get(name)
    if argument is None:
        if instead := suggestions.CONSTRUCTOR.get(name):
            raise ArgumentError(f"LLM has no argument {name!r}; {instead}.", parameter=name, value=value)
        hint = nearest(name, ARGUMENTS) or f" It takes {', '.join(_HONOURED)}."
        raise ArgumentError(f"LLM has no argument {name!r}, and neither has vLLM's.{hint}", parameter=name, value=value)
    if argument.status == "honoured":
        raise TypeError(f"{name!r} is a parameter of LLM itself, which should have taken it")
    if argument.status == "accepted":
        return "" if value is None else f"{name}: {argument.note}"
    if not any(_equal(value, harmless) for harmless in argument.harmless):
        shown = "..." if name in _SECRETS else " ".join(reprlib.repr(value).split())
        raise ValidationError(f"{name}={shown} is refused: {argument.note}", parameter=name, value=value)
    return ""


def _equal(value: object, harmless: object) -> bool:
    """`value == harmless` as one bool; False if the comparison has no single result (an array of several elements)."""
    try:
        return bool(value == harmless)
    except (TypeError, ValueError, RuntimeError):
        return False


_NAMES = {*ARGUMENTS, *(item.name for item in fields(SamplingParams))}


def differences() -> str:
    """The tables, each under a heading that says what it lists."""
    tables = {
        "`SamplingParams`, where it is different or has more": _table(
            "field", "here", _described("Different from vLLM, on purpose", "Beyond vLLM")
        ),
        "Arguments of `LLM` with another default or a wider meaning": _table("argument", "here", DIFFERENT.items()),
        "Refused, except at the values that ask for nothing": _table(
            "argument", "why, and what to do instead", _by_note("refused")
        ),
        "Taken, and without an effect of its own on any answer": _table("argument", "why", _by_note("accepted")),
    }
    return "\n\n".join("\n".join([f"## {title}", "", *lines]) for title, lines in tables.items())


def _described(*titles: str) -> list[tuple[str, str]]:
    """(what, here) of the lists under these titles of the docstring; a further indented line continues the entry."""
    found: list[tuple[str, str]] = []
    for title in titles:
        section = (sampling_params.__doc__ or "").split(f"    {title}\n", 1)[1].split("\n\n", 1)[0]
        for line in section.splitlines():
            what, _, here = line.strip().partition("  ")
            if line.startswith("     "):
                found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
            else:
                found.append((what, here.strip()))
    return found


def _by_note(status: str) -> list[tuple[str, str]]:
    """(names, note), one for each note."""
    names: dict[str, list[str]] = {}
    for name, argument in ARGUMENTS.items():
        if argument.status == status:
            names.setdefault(argument.note, []).append(name)
    return [(", ".join(same), note) for note, same in names.items()]


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"| {left} | {right} |", "|---|---|"]
    return lines + [f"| {_code(what)} | {here} |" for what, here in rows]


def _code(names: str) -> str:
    """The names of arguments and fields as code."""
    return re.sub(r"\w+", lambda word: f"`{word[0]}`" if word[0] in _NAMES else word[0], names)


if __name__ == "__main__":
    print(differences())
