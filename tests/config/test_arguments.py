"""The table of vLLM's constructor arguments: complete, in one voice, and never silent.

The names and defaults below are copied from vLLM's source (`LLM.__init__` and `EngineArgs`), so that the table is held
against vLLM and not against itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from llm.config.arguments import _GROUPS, ARGUMENTS, Argument, check_arguments
from llm.errors import ValidationError

# Every parameter of vllm.LLM and every field of vllm.EngineArgs: 0.32.0, which has all that are named for 0.33.0.
VLLM_SIGNATURE = """
_api_process_count _api_process_rank additional_config aggregate_engine_logging all2all_backend
allow_deprecated_quantization allowed_local_media_path allowed_media_domains async_scheduling attention_backend
attention_config aux_output_config block_size chat_template code_revision collect_detailed_traces compilation_config
config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_cascade_attn
disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
disable_nccl_for_dp_synchronization disable_sliding_window distributed_executor_backend distributed_timeout_seconds
download_dir dp_sync_interval dtype ec_manager_config ec_transfer_config elastic_ep_max_dp_size
enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep
enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune
enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_lora
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds enable_return_routed_experts
enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager
engram_config eplb_config expert_placement_strategy fail_on_environ_validation fault_tolerance_config
fully_sharded_loras gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides
hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode
jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config kv_offloading_backend
kv_offloading_size kv_sharing_fast_prefill kv_transfer_config language_model_only limit_mm_per_prompt linear_backend
load_format log_config_file log_level logging_config logits_processors logprobs_mode long_prefill_token_threshold
long_prefill_token_threshold_adaptive lora_dtype lora_target_modules mamba_backend mamba_block_size
mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm
master_addr master_port max_cpu_loras max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank
max_loras max_model_len max_num_active_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens
max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers media_io_kwargs mm_device_do_normalize
mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_class_overrides model_impl model_loader_extra_config
model_weights moe_backend nnodes node_rank num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes
offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step optimization_level
otlp_traces_endpoint override_generation_config per_request_spec_decode_metrics performance_mode
pipeline_parallel_size pooler_config prefill_context_parallel_size prefill_schedule_interval
prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location
quantization quantization_config ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin
renderer_num_workers replayssm_buffer_len return_sampling_mask revision runner safetensors_load_strategy
safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl
scheduling_policy seed served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
skip_tokenizer_init sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend
spec_method spec_model spec_tokens specialize_active_lora speculative_config stream_interval
structured_outputs_config swa_bounded_replay tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision
tokens_only trust_remote_code ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method
video_pruning_rate watermark watermark_config weight_transfer_config worker_cls worker_extension_cls
"""
VLLM_NAMES = VLLM_SIGNATURE.split()

OURS = {
    "device",
    "devices",
    "calibration",
    "requantize",
    "num_threads",
    "offload_weights",
    "verbose",
    "merge_lora",
    "prefix_cache",
}
DROPPED_BY_VLLM = {
    *("swap_space", "max_seq_len_to_capture", "use_v2_block_manager", "num_scheduler_steps"),
    *("task", "rope_scaling", "rope_theta", "guided_decoding_backend"),
}

# vLLM's defaults of the arguments that are refused at other values (a config object's default is written None).
VLLM_DEFAULTS: list[tuple[Any, str]] = [
    (
        "auto",
        "config_format tokenizer_mode mamba_cache_dtype mamba_ssm_cache_dtype worker_cls",
    ),
    ("", "model_weights worker_extension_cls"),
    ("auto", "lora_dtype"),
    (["original/**/*"], "ignore_patterns"),
    ([], "kv_cache_dtype_skip_layers"),
    ({}, "model_class_overrides additional_config"),
    (set(), "cpu_offload_params offload_params"),
    (0, "cpu_offload_gb offload_group_size node_rank"),
    (1, "pipeline_parallel_size nnodes"),
    (1, "prefill_context_parallel_size decode_context_parallel_size"),
    (False, "enable_prompt_embeds tokens_only enable_mamba_cache_stochastic_rounding disable_sliding_window"),
    (False, "use_fp64_gumbel enable_trace_replay return_sampling_mask enable_return_routed_experts"),
    (False, "mm_encoder_only enable_layerwise_nvtx_tracing ray_workers_use_nsight"),
    (None, "hf_config_path tokenizer_revision download_dir hf_token quantization_config engram_config"),
    (None, "lora_target_modules"),
    (None, "diffusion_config watermark_config spec_method spec_model spec_tokens"),
    (None, "default_mm_loras io_processor_plugin scheduler_cls data_parallel_rank data_parallel_start_rank"),
    (None, "data_parallel_size_local device_ids kv_transfer_config kv_events_config"),
    (None, "ec_transfer_config weight_transfer_config otlp_traces_endpoint collect_detailed_traces mamba_config"),
    (None, "attention_config aux_output_config structured_outputs_config"),
]
DEFAULTS = {name: default for default, names in VLLM_DEFAULTS for name in names.split()}

REFUSED = {name: argument for name, argument in ARGUMENTS.items() if argument.status == "refused"}
ACCEPTED = {name: argument for name, argument in ARGUMENTS.items() if argument.status == "accepted"}
HONOURED = {name: argument for name, argument in ARGUMENTS.items() if argument.status == "honoured"}

# What the second half of a refusal starts with: it tells the reader what to do.
IMPERATIVES = {
    *("use", "pass", "set", "leave", "call", "write", "start", "choose", "put", "copy", "add", "ask", "sort", "let"),
    *("merge", "change", "convert", "compute", "wrap"),
}


def is_one_sentence(note: str) -> bool:
    return note.endswith(".") and ". " not in note and "\n" not in note and note.count(";") <= 1


def says_what_to_do(note: str) -> bool:
    why, _, instead = note.partition("; ")
    return bool(why) and bool(instead) and instead.split()[0].rstrip(",") in IMPERATIVES


def test_the_table_holds_every_name_once() -> None:
    assert len(VLLM_NAMES) == len(set(VLLM_NAMES)) == 257
    assert set(ARGUMENTS) == set(VLLM_NAMES) | OURS | DROPPED_BY_VLLM
    assert sum(map(len, _GROUPS)) == len(ARGUMENTS), "a name stands in two groups"


def test_every_note_is_one_sentence() -> None:
    assert [name for name, argument in (ACCEPTED | REFUSED).items() if not is_one_sentence(argument.note)] == []
    assert not is_one_sentence("It is off. Leave it out.")  # the check can fail


def test_every_refusal_says_what_to_do_instead() -> None:
    assert [name for name, argument in REFUSED.items() if not says_what_to_do(argument.note)] == []
    assert not says_what_to_do("it is not supported.")  # the check can fail
    assert not says_what_to_do("it is not supported; sorry.")


def test_only_refused_arguments_have_harmless_values() -> None:
    assert [name for name, argument in REFUSED.items() if not argument.harmless] == []
    assert [name for name, argument in (HONOURED | ACCEPTED).items() if argument.harmless] == []


def test_vllm_defaults_pass() -> None:
    assert set(DEFAULTS) == set(REFUSED) - DROPPED_BY_VLLM
    assert check_arguments(DEFAULTS) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_argument(name: str) -> None:
    for harmless in REFUSED[name].harmless:
        assert check_arguments({name: harmless}) == []
    value = object()
    with pytest.raises(ValidationError) as caught:
        check_arguments({name: value})
    assert caught.value.parameter == name
    assert caught.value.value is value
    assert str(caught.value).startswith(f"{name}=")
    assert str(caught.value).endswith(REFUSED[name].note)


def test_accepted_arguments_leave_their_notes() -> None:
    expected = [f"{name}: {argument.note}" for name, argument in ACCEPTED.items()]
    assert check_arguments(dict.fromkeys(ACCEPTED, object())) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("default_mm_loras", {"image": "/adapter"}),
        ("spec_method", "ngram"),
        ("cpu_offload_gb", 4.0),
        ("hf_token", False),
    ],
)
def test_values_that_change_something_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"^{name}=.* is refused: ") as caught:
        check_arguments({"trust_remote_code": True, name: value})
    assert (caught.value.parameter, caught.value.value) == (name, value)


def test_notes_come_in_the_order_given() -> None:
    notes = check_arguments(
        {"gpu_memory_utilization": 0.9, "pipeline_parallel_size": 1, "trust_remote_code": True, "swap_space": 4}
    )
    assert [note.split(": ")[0] for note in notes] == ["gpu_memory_utilization", "trust_remote_code", "swap_space"]
    assert "kv_cache_memory_bytes" in notes[0]
    assert "never run" in notes[1]
    assert check_arguments({}) == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("kv_cache_memory", "kv_cache_memory_bytes"),
    ],
)
def test_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}'.* Did you mean '{nearest}'") as caught:
        check_arguments({name: 1})
    assert (caught.value.parameter, caught.value.value) == (name, 1)


def test_unknown_name_with_no_neighbour_lists_what_there_is() -> None:
    with pytest.raises(ValidationError, match=r"It takes model, tokenizer, .*max_model_len"):
        check_arguments({"zzz": 1})


class Uncomparable:
    """Refuses to be compared, to be hashed, and to be shown."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError("no")

    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "value",
    [np.arange(3), np.zeros((2, 2)), [np.arange(3)], {"a": np.arange(3)}, Uncomparable(), float("nan")],
    ids=lambda value: type(value).__name__,
)
def test_values_without_an_equality_are_refused_not_crashed_on(value: Any) -> None:
    for name in REFUSED:
        with pytest.raises(ValidationError) as caught:
            check_arguments({name: value})
        assert caught.value.value is value
        assert "\n" not in str(caught.value)


def test_equal_values_of_other_types_pass() -> None:
    assert (
        check_arguments(
            {"pipeline_parallel_size": np.int64(1), "enable_prompt_embeds": np.False_, "cpu_offload_gb": 0.0}
        )
        == []
    )


def test_the_token_is_not_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        check_arguments({"hf_token": "hf_secret"})
    assert "secret" not in str(caught.value)
    assert "HF_TOKEN" in str(caught.value)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ValidationError) as caught:
        check_arguments({"kv_transfer_config": {f"key_{i}": "x" * 1000 for i in range(100)}})
    assert len(str(caught.value)) < 400


def test_an_honoured_name_is_not_swallowed() -> None:
    for name in HONOURED:
        with pytest.raises(TypeError, match=f"'{name}' is a parameter of LLM itself"):
            check_arguments({name: None})


def test_an_argument_is_frozen() -> None:
    with pytest.raises(AttributeError):
        ARGUMENTS["seed"].status = "refused"  # type: ignore[misc]
    assert ARGUMENTS["seed"] == Argument("honoured", "")


def test_honoured_means_a_parameter_of_llm() -> None:
    from llm.llm import LLM

    parameters = inspect.signature(LLM.__init__).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named - {"self"} == set(HONOURED)
