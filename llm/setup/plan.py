"""Every decision of start-up, with its reason.

A `RunnerPlan` is derived from the arguments (`LLMArgs`) and the model folder (`ReadModel`): plain data, nothing is
built. The arithmetic of memory is `llm.setup.memory`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from llm.base import system
from llm.base.checks import refuse
from llm.config import env
from llm.config.compilation import CompilationConfig
from llm.config.engine import (
    CACHE_DTYPES,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_SEQS,
    DTYPES,
    GIB,
    CacheConfig,
    EngineConfig,
    LLMArgs,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    ReasoningConfig,
    SpeculativeConfig,
)
from llm.engine.boundary import PoolingPlan, RunnerPlan
from llm.errors import OutOfMemoryError, ValidationError
from llm.forward import QUANTIZED_CACHE_DTYPES, KVCacheSpec, LatentCacheSpec, PagedSpec, StateSpec, all_roll_back
from llm.kernels.backend import OPERATIONS, Backend
from llm.layers.attention import attention_backend
from llm.layers.parallel import SINGLE, TensorParallel
from llm.loading.loader import stored_as
from llm.loading.weight_file import check_folder, offload_folder
from llm.platforms import Platform
from llm.platforms.interface import supported_dtypes
from llm.pooling_params import PoolerConfig
from llm.quantization.base import QuantizationConfig
from llm.quantization.formats.gguf import GGUFConfig
from llm.quantization.on_load import OnlineConfig
from llm.quantization.requantize import RequantizeConfig
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling_params import SamplingParams
from llm.setup.extensions import kv_cache_specs
from llm.setup.memory import (
    MemoryPlan,
    adapter_reasons,
    choose_snapshot_interval,
    plan_adapters,
    plan_memory,
    plan_scheduler,
    resident_weight_bytes,
    resolve_dtype,
    widened_bytes,
)
from llm.setup.model_folder import ReadModel

# How many times as fast another dtype has to be, for the config to say so.
WORTH_TELLING = 1.3
_TAKEN_AS_THEY_ARE = "block_size enable_prefix_caching load_format max_logprobs logprobs_mode seed revision".split()


@dataclass(frozen=True)
class Dtypes:
    """`compute`: of activations; `weights`: of stored matrices; `store_as`: the same if the user set it, else None."""

    compute: torch.dtype
    weights: torch.dtype
    store_as: torch.dtype | None

    def of_cache(self, args: LLMArgs) -> torch.dtype:
        """The KV cache's by default: `dtype`, or if that is "auto" the weights' type."""
        return self.weights if args.dtype == "auto" else self.store_as or self.compute


def make_plan(
    args: LLMArgs,
    model: ReadModel,
    platform: Platform,
    compilation: CompilationConfig,
    backend: Backend,
    logits_processors: Sequence[type[LogitsProcessor]],
    tp: TensorParallel = SINGLE,
    free: int | None = None,
    head: ReadModel | None = None,
) -> RunnerPlan:
    """The plan of rank `tp` in `free` bytes; raises `ValidationError` and `OutOfMemoryError`, and allocates nothing."""
    args = _for_pooling(args, model)
    check_activations(choose_dtypes(args, model, platform).compute, backend)
    dtypes, (adapters, free) = choose_dtypes(args, model, platform), plan_adapters(args, model, platform, free)
    if platform.device.type == "cpu":
        free //= tp.size  # the ranks are on one machine
    kv_dtype, why = choose_cache_dtype(args, dtypes.of_cache(args), model.quantization.config)
    specs, of_head = _specs(model, head, kv_dtype, tp, platform), weight_bytes_in_memory(args, head, platform)
    why += check_cache(args.kv_cache_dtype, kv_dtype, specs, platform, model.quantization.config)
    memory, offload = _plan_memory(args, model, dtypes, specs, free - of_head, backend, tp)
    scheduler, reasons = plan_scheduler(
        args, memory.max_model_len, free, batched_tokens=platform.batched_tokens, whole=_is_whole(model)
    )
    reasons |= memory.reasons | _reasons(args, model, dtypes, compilation, backend) | {"kv_cache_dtype": why}
    _add_notes(reasons, args, model, memory)
    speculation = choose_speculation(args, specs, backend, reasons)
    ahead, reasons["async_scheduling"] = _async_scheduling(args, model, platform, speculation, tp)
    config = EngineConfig(
        _model_config(args, model, dtypes, memory.max_model_len, _seed(args, reasons)),
        _cache_config(args, memory, kv_dtype),
        replace(scheduler, async_scheduling=ahead),
        str(platform.device),
        backend.invariant[0],
        compilation,
        reasons,
        model.quantization.config,
        _num_threads(args, platform, reasons, tp),
        ReasoningConfig.of(args.reasoning_config),
        speculation,
        offload,
        adapters,
        parallel_config=ParallelConfig(tensor_parallel_size=tp.size, world_size=tp.size),
    )
    return RunnerPlan(
        config,
        f"{platform.name}:{platform.index}" if platform.index else platform.name,
        source=model.source,
        model_class=model.model_class,
        architecture=model.architecture,
        hf_config=model.reader.decoded,
        kv_cache_specs=tuple(specs),
        has_weights=model.has_weights,
        store_as=dtypes.store_as,
        is_quantized=model.quantization.found,
        show_progress=args.use_tqdm_on_load,
        logits_processors=tuple(logits_processors),
        rank=tp.rank,
        tp_size=tp.size,
        device_index=platform.index,
        measures_cache=backend.device.type != "cpu"
        and args.kv_cache_memory_bytes is None
        and model.pooling is None
        and tp.size == 1,  # the other ranks are told the size before they load
        pooling=model.pooling,
    )


def _async_scheduling(
    args: LLMArgs, model: ReadModel, platform: Platform, speculation: SpeculativeConfig | None, tp: TensorParallel
) -> tuple[bool, str]:
    """(whether a device starts steps before the host has read the tokens of those before, why)."""
    if platform.device.type == "cpu":
        return False, "a CPU computes nothing while the host goes on"
    if args.async_scheduling is False:
        return False, "asked for"
    if tp.size > 1:
        return False, "the other ranks are told the tokens, which the host has to read for that"
    if model.pooling is not None or speculation is not None:
        return False, "the next step depends on this one's results"
    return True, "a step is started before the tokens of the one before are read, where it needs nothing else of them"


def _specs(
    model: ReadModel, head: ReadModel | None, dtype: torch.dtype, tp: TensorParallel, platform: Platform
) -> list[StateSpec]:
    """The model's states, and then those of a head that drafts from its hidden states."""
    found = list(model.model_class.kv_cache_specs(model.architecture, dtype, tp))
    if head is not None:
        found += head.model_class.kv_cache_specs(head.architecture, dtype)  # rank 0 has all of it
    return list(kv_cache_specs(platform, found))


def _for_pooling(args: LLMArgs, model: ReadModel) -> LLMArgs:
    """A pooling model drafts nothing, and keeps keys in full precision for its one step. If its tokens see those after
    them, a prompt is computed in one step and shares no prefix."""
    if model.pooling is None:
        return args
    if args.logits_processors:
        right = "left out: a pooling model computes no logits that they could change"
        refuse("logits_processors", args.logits_processors, right)
    asked = SpeculativeConfig.of(args.speculative_config)
    if asked is not None and not asked.is_default:
        refuse("speculative_config", args.speculative_config, "left out: a pooling model generates no tokens to draft")
    kv = "float32" if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    args = replace(args, speculative_config=None, kv_cache_dtype=kv)
    if model.pooling.is_causal:
        return args
    return replace(args, enable_chunked_prefill=False, enable_prefix_caching=False)


def _add_notes(reasons: dict[str, str], args: LLMArgs, model: ReadModel, memory: MemoryPlan) -> None:
    reasons["max_model_len"] += _rope_note(model, memory.max_model_len)
    reasons |= snapshot_reasons(args, memory, model.chosen.name)


def choose_dtypes(args: LLMArgs, model: ReadModel, platform: Platform) -> Dtypes:
    """A `dtype` that the platform does not compute in is only the type of the weights.

    Where it computes in several, activations are of its preferred type, or of the weights' if both have 16 bits; and
    matrices are stored in the type of the activations.
    """
    computes_in = supported_dtypes(platform)
    if len(computes_in) > 1:
        own, stored = computes_in[0], model.stored_dtype
        if own.itemsize == stored.itemsize == 2 and stored in computes_in:
            own = stored
        dtype, _ = resolve_dtype("dtype", args.dtype, own, computes_in)
        return Dtypes(dtype, dtype, None if dtype == model.stored_dtype else dtype)
    dtype, _ = resolve_dtype("dtype", args.dtype, computes_in[0], tuple({*computes_in, *DTYPES.values()}))
    if dtype in computes_in:
        return Dtypes(dtype, model.stored_dtype, None)
    return Dtypes(computes_in[0], dtype, dtype)


def check_activations(dtype: torch.dtype, backend: Backend) -> None:
    """Raise `ValidationError` for activations that a kernel of the backend does not take."""
    refused = [name for name in OPERATIONS if dtype not in backend.takes(name)]
    if refused:
        names = [str(item).removeprefix("torch.") for item in backend.takes(refused[0])]
        shown = ", ".join(refused[:3]) + (" ..." if len(refused) > 3 else "")
        refuse(
            "dtype",
            str(dtype).removeprefix("torch."),
            f"{' or '.join(names)}, which {backend.name} kernels take ({shown})",
        )


def _seed(args: LLMArgs, reasons: dict[str, str]) -> int:
    if args.seed is not None:
        return args.seed
    reasons["seed"] = "drawn at start, for seed=None"
    return int.from_bytes(os.urandom(8), "little")


def _num_threads(args: LLMArgs, platform: Platform, reasons: dict[str, str], tp: TensorParallel) -> int | None:
    """The user's number of threads, at most as many as the platform allows; None: PyTorch's at each step."""
    if tp.size > 1 and args.num_threads is None:
        reasons["num_threads"] = f"of each of {tp.size} ranks: torch.get_num_threads() shared out"
        return max(1, min(torch.get_num_threads(), platform.num_threads()) // tp.size)
    wanted, most = args.num_threads or torch.get_num_threads(), platform.num_threads()
    who = "torch.get_num_threads()" if args.num_threads is None else "asked for"
    reasons["num_threads"] = who if wanted <= most else f"{wanted}, {who}, but this process may use {most} processors"
    return min(wanted, most) if args.num_threads is not None or wanted > most else None


def warn_of_offload(args: LLMArgs, plan: RunnerPlan) -> None:
    """Warn where weights are read from a file and nobody asked for it."""
    config = plan.config
    if config.offload_config.offload_weights and args.offload_weights is None:
        logging.getLogger("llm").warning(
            "%s: weights are kept in a file in %s and read from it in every step, which is slow; quantization= makes "
            "them smaller, and offload_weights=False refuses what does not fit.",
            config.reasons["offload_weights"],
            config.offload_config.offload_folder,
        )


def with_reasons(plan: RunnerPlan, reasons: dict[str, str]) -> RunnerPlan:
    """The plan with further reasons in its config."""
    return replace(plan, config=replace(plan.config, reasons=plan.config.reasons | reasons))


def with_sampling_defaults(plan: RunnerPlan, params: SamplingParams) -> RunnerPlan:
    """The plan with what the default params say, where they do not say what `SamplingParams` does."""
    said = {name: getattr(params, name) for name, origin in params.origins.items() if origin != "default"}
    model_config = replace(plan.config.model_config, sampling_defaults=said)
    return replace(plan, config=replace(plan.config, model_config=model_config))


def _model_config(args: LLMArgs, model: ReadModel, dtypes: Dtypes, max_model_len: int, seed: int) -> ModelConfig:
    return ModelConfig(
        model=str(args.model),
        tokenizer=str(args.tokenizer or args.model),
        model_type=model.reader.family,
        architecture=model.model_class.__name__,
        dtype=dtypes.compute,
        weight_dtype=dtypes.weights,
        max_model_len=max_model_len,
        vocab_size=model.architecture.vocab_size,
        quantization=model.quantization.name,
        load_format=args.load_format,
        max_logprobs=args.max_logprobs,
        logprobs_mode=args.logprobs_mode,
        seed=seed,
        revision=args.revision,
        model_impl=model.chosen.name,
        runner_type=model.purpose.runner,
        convert_type=model.purpose.convert,
        embedding_size=_embedding_size(model),
        architectures=tuple(model.reader.names("architectures") or ()),
        pooler_config=None if model.pooling is None else _pooler_config(model.pooling),
    )


def _embedding_size(model: ReadModel) -> int:
    if model.pooling is not None and model.pooling.task == "embed":
        return model.pooling.size
    return int(getattr(model.architecture, "hidden_size", 0))


def _pooler_config(plan: PoolingPlan) -> PoolerConfig:
    activates = plan.activation != "identity" if plan.task == "classify" else plan.modules.normalizes
    whole = None if plan.by_token else plan.modules.pooling_type
    return PoolerConfig(
        task=plan.default_task or (f"token_{plan.task}" if plan.by_token else plan.task),
        seq_pooling_type=whole,
        tok_pooling_type="ALL",
        use_activation=activates,
        dimensions=plan.dimensions,
    )


def _cache_config(args: LLMArgs, memory: MemoryPlan, dtype: torch.dtype) -> CacheConfig:
    return CacheConfig(
        block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        num_blocks=memory.num_blocks,
        kv_cache_memory_bytes=memory.kv_cache_memory_bytes,
        kv_cache_dtype=dtype,
        enable_prefix_caching=args.enable_prefix_caching
        and (memory.mamba_block_size > 0 or not memory.num_state_slots),
        num_state_slots=memory.num_state_slots,
        num_state_snapshots=memory.num_state_snapshots,
        mamba_block_size=memory.mamba_block_size,
    )


def _reasons(
    args: LLMArgs, model: ReadModel, dtypes: Dtypes, compilation: CompilationConfig, backend: Backend
) -> dict[str, str]:
    """Field name -> why it has its value, for the fields that need no arithmetic."""
    return {
        "tensor_parallel_size": args.why("tensor_parallel_size"),
        "dtype": _dtype_reason(args, model, dtypes, backend),
        "weight_dtype": _weight_dtype_reason(args, model, dtypes, backend),
        "invariant": backend.invariant[1],
        "model_type": "config.json",
        "architecture": _architecture_reason(model),
        "model_impl": model.chosen.why,
        "runner_type": model.purpose.why,
        "convert_type": model.purpose.why,
        "mode": _mode_reason(args, compilation),
        "backend": "of what is compiled",
        "custom_ops": f"operations that it does not name: {compilation.base_mode}",
        "vocab_size": "config.json",
        "tokenizer": "the model's own" if args.tokenizer is None else "asked for",
        **{name: args.why(name) for name in _TAKEN_AS_THEY_ARE},
        "quantization": model.quantization.reason,
        **adapter_reasons(args, model),
    }


def _architecture_reason(model: ReadModel) -> str:
    theirs = getattr(model.architecture, "class_name", None)
    reason = "config.json" if theirs is None else f"runs {theirs} of the installed transformers"
    left_out: tuple[str, ...] = getattr(model.model_class, "left_out", ())
    if not left_out:
        return reason
    if isinstance(model.reader.raw.get("vision_config"), Mapping):
        return f"{reason}; the vision tower is read when the first image comes, and audio is not read"
    return f"{reason}; weights of {', '.join(left_out)} are left out"


def _dtype_reason(args: LLMArgs, model: ReadModel, dtypes: Dtypes, backend: Backend) -> str:
    if backend.device.type != "cpu":
        return f"{args.dtype}; activations are {str(dtypes.compute).removeprefix('torch.')}, sums and logits float32"
    if dtypes.store_as is torch.bfloat16 and backend.rounds_bf16_inputs:
        return f"{args.dtype}; matrix products read activations rounded to bfloat16, everything else is float32"
    exact = f"{args.dtype}; activations and accumulation are float32 on a CPU"
    config = model.quantization.config
    has_integers = model.quantization.found or (isinstance(config, OnlineConfig) and config.multiplies_integers)
    could_round = backend.rounds_bf16_inputs and dtypes.store_as is None and dtypes.weights is torch.bfloat16
    if could_round and backend.bf16_gain > WORTH_TELLING and not has_integers:
        faster = f"prompts and batches {backend.bf16_gain:g} times as fast here"
        return f"{exact}; dtype='bfloat16' rounds what matrix products read: {faster}"
    return exact


def _mode_reason(args: LLMArgs, compilation: CompilationConfig) -> str:
    if args.enforce_eager:
        return "enforce_eager=True: nothing is compiled"
    return "operations that are off are compiled one by one" if compilation.compiles else "nothing is compiled"


def _weight_dtype_reason(args: LLMArgs, model: ReadModel, dtypes: Dtypes, backend: Backend) -> str:
    merged = "" if args.merge_lora is None else f"; the adapter {args.merge_lora} is added"
    if dtypes.store_as and backend.device.type != "cpu":
        return f"matrices that are not quantized have the activations' type{merged}"
    if dtypes.store_as:
        return f"asked for by dtype={args.dtype}: a CPU stores matrices in it and adds in float32{merged}"
    return f"as the checkpoint stores them{merged}" if model.has_weights else "config.json"


def _is_whole(model: ReadModel) -> bool:
    """True if a prompt is computed in one step, because its tokens see those after them."""
    return model.pooling is not None and not model.pooling.is_causal


def _rope_note(model: ReadModel, max_model_len: int) -> str:
    """How `max_model_len` determines rope frequencies, also for short prompts; "" if it does not."""
    for rope in getattr(model.architecture, "ropes", ()):
        original = rope.original_max_position_embeddings
        if rope.rope_type == "longrope":
            side = ("long", "beyond") if max_model_len > original else ("short", "within")
            return f"; LongRoPE's {side[0]} factors, for it is {side[1]} the original {original}"
        if rope.rope_type == "dynamic":
            return "; the dynamic rope is scaled for this length once"
    return ""


def _plan_memory(
    args: LLMArgs,
    model: ReadModel,
    dtypes: Dtypes,
    specs: Sequence[StateSpec],
    free: int,
    backend: Backend,
    tp: TensorParallel,
) -> tuple[MemoryPlan, OffloadConfig]:
    """With all weights in memory if there is room for them and for the KV cache, else with a file of weights."""
    weights = _weight_bytes(model, dtypes) // tp.size
    longest, reason = longest_sequence(args, model, specs, free)
    plan = partial(
        plan_memory,
        bytes_per_token=sum(spec.bytes_per_token() for spec in specs),
        bytes_per_request=sum(spec.bytes_per_request() for spec in specs),
        block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        max_num_seqs=args.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        max_model_len=args.max_model_len,
        longest=longest,
        longest_reason=reason,
        requested_bytes=args.kv_cache_memory_bytes,
        snapshot_interval=snapshot_interval(args, specs, model.chosen.name),
    )
    if not args.offload_weights:
        try:
            if weights > free:
                raise OutOfMemoryError(_too_large(weights, free, backend))
            reasons = {"offload_weights": "asked for" if args.offload_weights is False else "they fit into memory"}
            return _with_reasons(plan(free_bytes=free - weights), reasons), OffloadConfig()
        except OutOfMemoryError:
            if args.offload_weights is False or not backend.offloads:
                raise
    if not backend.offloads:
        why = f"with the operations of {backend.name}: {backend.reason}"
        refuse("offload_weights", True, f"None or False {why if system.deletes_open_files() else 'on Windows'}")
    # Half of a half: what the KV cache does not take holds weights.
    return _offloaded(args, model, plan(free_bytes=free // 2), weights, free)


def _offloaded(
    args: LLMArgs, model: ReadModel, memory: MemoryPlan, weights: int, free: int
) -> tuple[MemoryPlan, OffloadConfig]:
    """Raises `OutOfMemoryError` where the disk has no room."""
    tensors = model.source.tensors().tensors.values() if model.has_weights else ()
    largest = max((info.nbytes for info in tensors), default=0)
    resident = 0 if args.offload_weights else resident_weight_bytes(free, memory.kv_cache_memory_bytes, largest)
    folder = offload_folder()
    check_folder(folder, max(0, weights - resident))
    needs = f"the weights take {weights / GIB:.2f} GiB, the KV cache {memory.kv_cache_memory_bytes / GIB:.2f}"
    reasons = {
        "offload_weights": "asked for" if args.offload_weights else f"{needs}, and {free / GIB:.2f} are free",
        "offload_folder": "LLM_OFFLOAD_FOLDER" if env.get("LLM_OFFLOAD_FOLDER") else "the cache folder",
        "resident_weight_bytes": "what the KV cache, a step and the largest tensor leave",
        "planned_weight_bytes": "by the checkpoint's tensors" if model.has_weights else "random weights",
    }
    return _with_reasons(memory, reasons), OffloadConfig(True, str(folder), resident, weights)


def _with_reasons(memory: MemoryPlan, reasons: dict[str, str]) -> MemoryPlan:
    return replace(memory, reasons=memory.reasons | reasons)


def _too_large(weights: int, free: int, backend: Backend) -> str:
    ways = "free memory, pass quantization= to make them smaller while they are read, or choose a smaller model"
    more = ", or let them be read from a file with offload_weights=None" if backend.offloads else ""
    return f"the weights take {weights} bytes and {free} are free; {ways}{more}."


def weight_bytes_in_memory(args: LLMArgs, model: ReadModel | None, platform: Platform) -> int:
    """About what the weights will take; 0: there is no model."""
    return 0 if model is None else _weight_bytes(model, choose_dtypes(args, model, platform))


def _weight_bytes(model: ReadModel, dtypes: Dtypes) -> int:
    """Bytes of the loaded weights; a lower bound if they are quantized on load."""
    if not model.has_weights:
        return 0
    config = model.quantization.config
    if isinstance(config, RequantizeConfig):
        config = config.stored
    named = model.source.tensors().tensors
    tensors = named.values()
    if isinstance(config, GGUFConfig):
        return config.expected_bytes({name: (info.shape, info.nbytes) for name, info in named.items()})
    if not isinstance(config, OnlineConfig):
        as_stored = sum(
            math.prod(info.shape) * stored_as(info.dtype, len(info.shape), dtypes.store_as).itemsize for info in tensors
        )
        return as_stored + widened_bytes(model.architecture, named)
    return config.expected_bytes([(info.shape, info.nbytes) for info in tensors])


def choose_speculation(
    args: LLMArgs, specs: Sequence[StateSpec], backend: Backend, reasons: dict[str, str]
) -> SpeculativeConfig | None:
    """What drafts tokens. By default nothing does where drafts could change an answer."""
    config = SpeculativeConfig.of(args.speculative_config)
    reasons["speculative_config"] = args.why("speculative_config") + "; answers do not depend on it"
    if config is None:
        return None
    takes_back = all_roll_back(specs)
    if not takes_back and not config.is_default:
        raise ValidationError(
            "speculative_config cannot be used with this model: its code keeps recurrent states, from which it cannot "
            "take back a rejected draft; leave it out.",
            parameter="speculative_config",
        )
    goes_on = backend.device.type != "cpu" and args.async_scheduling is not False
    if takes_back and (not config.is_default or (backend.invariant[0] and not goes_on)):
        return config
    why = "answers depend on the batch" if takes_back else "a rejected draft would stay in the recurrent states"
    if takes_back and goes_on:
        why = "a device computes the next step in the place of drafts (async_scheduling)"
    reasons["speculative_config"] = f"default; {why}"
    return None


def choose_cache_dtype(
    args: LLMArgs, default: torch.dtype, config: QuantizationConfig | None
) -> tuple[torch.dtype, str]:
    """(dtype, reason). default: that of `dtype=`, or if that is "auto" of the weights; a checkpoint's static scales
    come before it."""
    static = None if config is None else config.static_cache
    auto = default if static is None or not static.is_default else static.dtype
    dtype, reason = resolve_dtype("kv_cache_dtype", args.kv_cache_dtype, auto, tuple(CACHE_DTYPES.values()))
    if static is not None and static.dtype == dtype:
        return dtype, f"{'' if reason == 'auto' else f'{reason}; '}static scales by {static.source}"
    if reason == "auto":
        unused = f"; kv_cache_dtype='fp8' uses the checkpoint's {static.source}" if static is not None else ""
        return dtype, ("the weights' type" if args.dtype == "auto" else f"dtype={args.dtype}") + unused
    if static is not None:
        reason += f"; the static scales of {static.source} are not used"
    return dtype, reason


def check_cache(
    given: object,
    dtype: torch.dtype,
    specs: Sequence[StateSpec],
    platform: Platform,
    config: QuantizationConfig | None = None,
) -> str:
    """What a quantized cache adds to its reason; "" of other types. Raises `ValidationError` if a state has none."""
    if dtype not in QUANTIZED_CACHE_DTYPES:
        return ""
    paged = [spec for spec in specs if isinstance(spec, PagedSpec)]
    floats = "a float type, such as 'bfloat16'"
    for spec in paged:
        if isinstance(spec, LatentCacheSpec) and spec.scales:
            continue
        if not isinstance(spec, KVCacheSpec):
            refuse("kv_cache_dtype", given, f"{floats}: this model keeps no keys and values of heads")
        backend = attention_backend(platform, spec.head_size)
        if not backend.reads_quantized:
            refuse("kv_cache_dtype", given, f"{floats}: {backend.__name__} reads nothing else")
    size = sum(spec.bytes_per_token() for spec in paged)
    static = None if config is None else config.static_cache
    heads = any(isinstance(spec, KVCacheSpec) for spec in paged)
    scales = "; a scale per token and KV head" if heads else "; a scale per token of each part of the latent vector"
    if static is not None and static.dtype == dtype:
        scales = ""
    # Of both types int8 alone is multiplied as integers, and of heads alone.
    widened = "" if heads and dtype == torch.int8 else "; widened to float32 to be read: it saves memory, not time"
    return f"{scales}; {size:,} bytes per token in all layers{widened}"


# --- Lengths. ---

# The tables may take 1 / this of the free memory, and always so many bytes.
_SHARE, _LEAST_BYTES = 128, 16 << 20
_BYTES = 4  # of a number of a table


def longest_sequence(args: LLMArgs, model: ReadModel, specs: Sequence[StateSpec], free: int) -> tuple[int, str]:
    """(positions, what limits them). With `max_model_len` given, the model's maximum."""
    longest: int = model.architecture.max_position_embeddings
    limit = None if model.pooling is None else model.pooling.modules.max_seq_length
    if limit is not None:  # sentence-transformers' files say so
        longest = min(longest, limit)
    channels = max((spec.head_size for spec in specs if isinstance(spec, KVCacheSpec)), default=0)
    table = _BYTES * channels * len(getattr(model.architecture, "ropes", ()))
    fitting = longest if args.max_model_len is not None or not table else max(free // _SHARE, _LEAST_BYTES) // table
    if fitting >= longest:
        return longest, "the model's maximum"
    return fitting, f"what rotary tables in 1/{_SHARE} of the free memory hold (the model's maximum is {longest})"


def snapshot_interval(args: LLMArgs, specs: Sequence[StateSpec], model_impl: str) -> int:
    """Tokens between two snapshots of recurrent states; 0: prefixes are not shared, or there are no such states.

    transformers' code takes none: some of it computes a prompt's further chunks token by token.
    """
    block_size = args.block_size or DEFAULT_BLOCK_SIZE
    if args.mamba_block_size is not None and args.mamba_block_size % block_size:
        refuse("mamba_block_size", args.mamba_block_size, f"a multiple of block_size={block_size}")
    per_request = sum(spec.bytes_per_request() for spec in specs)
    if not args.enable_prefix_caching or not per_request or model_impl == "transformers":
        return 0
    per_token = sum(spec.bytes_per_token() for spec in specs)
    return args.mamba_block_size or choose_snapshot_interval(per_token, per_request, block_size)


def snapshot_reasons(args: LLMArgs, memory: MemoryPlan, model_impl: str) -> dict[str, str]:
    """Field name of `CacheConfig` -> why it has its value."""
    if not memory.num_state_slots:
        none = "no layer keeps a recurrent state"
        return {"num_state_snapshots": none, "mamba_block_size": none}
    if not memory.mamba_block_size:
        on_theirs = "transformers' code computes a prompt's further chunks slowly: recurrent states are not copied"
        on_ours = "no sequence is long enough for a copy of its recurrent states, or there is no room for one"
        why = on_theirs if model_impl == "transformers" else on_ours
        return {"enable_prefix_caching": why if args.enable_prefix_caching else "asked for"}
    why = "asked for" if args.mamba_block_size else "by the memory that a copy of the states takes"
    return {
        "enable_prefix_caching": f"{args.why('enable_prefix_caching')}; up to a multiple of mamba_block_size tokens",
        "num_state_snapshots": "what sequences can use, or what memory is left; touched when used",
        "mamba_block_size": f"tokens between copies of the recurrent states; {why}",
    }
