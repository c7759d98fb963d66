"""From `EngineArgs` to a running engine.

Owns the order of start-up: read config.json, decide, build the model, load it, allocate the cache. Every phase is
timed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from llm.base.construction import constructing_for
from llm.base.errors import CheckpointError, OutOfMemoryError, ValidationError
from llm.config.compilation import CompilationConfig
from llm.config.defaults import library_defaults
from llm.config.engine import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_SEQS,
    DTYPES,
    CacheConfig,
    EngineArgs,
    EngineConfig,
    ModelConfig,
)
from llm.config.plan import MemoryPlan, plan_memory, plan_scheduler, resolve_dtype
from llm.engine.block_manager import BlockManager
from llm.engine.calibrate import calibrate
from llm.engine.engine import Engine
from llm.engine.extensions import (
    check_operations,
    kv_cache_specs,
    let_platform_update,
    reasons_of_update,
    what_varies,
    without_broken_platforms,
)
from llm.engine.kv_cache import group_layers
from llm.engine.model_runner import ModelRunner
from llm.engine.scheduler import Scheduler
from llm.forward import KVCacheSpec
from llm.kernels.select import KernelSet, kernels_for
from llm.loading.checkpoint import Checkpoint, read_json
from llm.loading.loader import load_dummy_weights, load_weights, stored_as
from llm.loading.quantization import Resolved, resolve_quantization, without_quantization_keys
from llm.loading.resolve import resolve_model as resolve_folder
from llm.loading.weight_map import Target, rename
from llm.models.config_reader import ConfigReader
from llm.models.interface import BuildOptions
from llm.models.registry import resolve_model
from llm.platforms import Platform, select_platform
from llm.plugins import load_class, load_general_plugins
from llm.quantization.configs.online import OnlineConfig
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.loading import load_logits_processors
from llm.sampling_params import SamplingParams
from llm.tokenizer import Tokenizer

_CONFIG_BYTES = 16 << 20
_TAKEN_AS_THEY_ARE = "block_size enable_prefix_caching load_format max_logprobs logprobs_mode seed revision".split()


class StartupTimes(dict[str, float]):
    """Phase name -> seconds, in order."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + perf_counter() - started


@dataclass
class BuiltEngine:
    engine: Engine
    default_params: SamplingParams
    startup: StartupTimes


@dataclass(frozen=True)
class Origin:
    """The checkpoint a model was loaded from.

    Attributes:
        hf_config: config.json.
        weight_dtype: of the unquantized model's weights.
        is_quantized: the checkpoint itself is.
        targets: where each tensor went; none for random weights.
    """

    folder: Path
    hf_config: Mapping[str, Any]
    weight_dtype: torch.dtype
    is_quantized: bool
    targets: Mapping[str, Target] = field(default_factory=dict)


@dataclass(frozen=True)
class _Source:
    """A model folder, read but not loaded.

    Attributes:
        weight_dtype: in memory: what most of the checkpoint's bytes are stored as, or what was asked for.
        store_as: `weight_dtype` where it was asked for.
    """

    folder: Path
    model_class: Any
    model: Any
    reader: ConfigReader
    checkpoint: Checkpoint | None
    dtype: torch.dtype
    weight_dtype: torch.dtype
    store_as: torch.dtype | None
    quantization: Resolved


@without_broken_platforms
@library_defaults()
def build_engine(args: EngineArgs) -> BuiltEngine:
    """Build and load; raises the errors of `llm.base.errors`, before memory is allocated wherever that is possible."""
    times = StartupTimes()
    with times.phase("read config"):
        platform, platform_reason, asked = *select_platform(args.device), args
        load_general_plugins()
        args = let_platform_update(platform, args)
        compilation = CompilationConfig.of(args.compilation_config, default_backend=platform.simple_compile_backend)
        processors = load_logits_processors(args.logits_processors)
        source = _read_source(args, platform)
        check_operations(compilation)
    quant_config = source.quantization.config
    if quant_config is not None:
        platform.verify_quantization(quant_config.get_name())
    if isinstance(quant_config, OnlineConfig) and quant_config.uses_calibration:
        with times.phase("calibrate"):
            plain = replace(args, quantization=None, calibration=None, logits_processors=None)
            quant_config.statistics = calibrate(lambda: build_engine(plain), quant_config.calibration)
    try:
        with times.phase("tokenizer"):
            tokenizer = _tokenizer(args, source.folder)
            generation = _generation_config(source.folder)
            eos = frozenset(_eos_token_ids(source.reader, generation))
        with times.phase("load kernels"):
            kernels = kernels_for(platform)
        with times.phase("plan"):
            config, specs = _resolve(args, source, platform, compilation, kernels)
            config.reasons["device"] = platform_reason
            config.reasons.update(reasons_of_update(platform, asked, args))
            platform.import_kernels()
        with (
            times.phase("build model"),
            constructing_for(platform, compilation, may_round=source.store_as is torch.bfloat16),
        ):
            with _told_of_memory():
                model = _build_model(source, config.model_config.max_model_len)
            varies = what_varies(model) if config.invariant else None
            if varies is not None:
                config = replace(config, invariant=False, reasons=config.reasons | {"invariant": varies})
        with times.phase("load weights"):
            if source.checkpoint is None:
                _check_dummy_weights_fit(model, platform.memory_free())
                with _told_of_memory():
                    load_dummy_weights(model, config.model_config.seed)
            else:
                _load_weights(model, source, source.checkpoint, args.use_tqdm_on_load)
    finally:
        if source.checkpoint is not None:
            source.checkpoint.close()
    with times.phase("allocate KV cache"):
        runner = _make_runner(model, specs, config, platform, processors)
    windows = [spec.sliding_window for spec in group_layers(specs)[0]]

    def make_scheduler() -> Scheduler:
        blocks = BlockManager(config.cache_config.num_blocks + 1, windows, config.cache_config.block_size)
        return Scheduler(config.scheduler_config, blocks)

    engine = Engine(config, make_scheduler, runner, tokenizer, eos)
    return BuiltEngine(engine, _default_params(args, generation), times)


def _build_model(source: _Source, max_model_len: int) -> Any:
    quant_config = source.quantization.config
    if quant_config is not None:
        back = tuple((ours, theirs) for theirs, ours in getattr(source.model_class, "renames", ()))
        quant_config.packed_modules_mapping = getattr(source.model_class, "packed_modules_mapping", {})
        quant_config.apply_mapper(lambda name: rename(name, back))
    model = source.model_class(source.model, BuildOptions(max_model_len, source.weight_dtype, quant_config))
    model.origin = Origin(source.folder, source.reader.raw, source.weight_dtype, source.quantization.found)
    if quant_config is not None:
        quant_config.check_used()
        quant_config.prepare_model(model)
    return model


@contextmanager
def _told_of_memory() -> Iterator[None]:
    """PyTorch's refusal to allocate, a RuntimeError without a type of its own, as ours."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise OutOfMemoryError("the model's weights cannot be allocated: there is not enough memory.") from error


def _check_dummy_weights_fit(model: Any, free: int) -> None:
    """Nothing is touched yet; weights that are quantized while they are made are on no device and count nothing."""
    needed = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    if needed > free:
        raise OutOfMemoryError(f"the model's weights take {needed} bytes and {free} are free.")


def _load_weights(model: Any, source: _Source, checkpoint: Checkpoint, show_progress: bool) -> None:
    quant_config = source.quantization.config
    ignores = (lambda name: False) if quant_config is None else quant_config.ignores
    targets = load_weights(model, checkpoint, show_progress=show_progress, ignores=ignores, store_as=source.store_as)
    # Saving a quantized model needs to know under which names its weights came.
    model.origin = replace(model.origin, targets=targets)


def _make_runner(
    model: Any,
    specs: list[KVCacheSpec],
    config: EngineConfig,
    platform: Platform,
    processors: list[type[LogitsProcessor]],
) -> ModelRunner:
    runner_class = load_class(
        platform.get_model_runner_cls(),
        ModelRunner,
        f"{type(platform).__name__}.get_model_runner_cls",
        platform.plugin,
    )
    try:
        return runner_class(model, specs, config, platform, processors)
    except MemoryError as error:  # only when the budget was asked for: the one we choose is within what is free
        size = config.cache_config.kv_cache_memory_bytes
        raise OutOfMemoryError(
            f"kv_cache_memory_bytes={size} cannot be allocated; lower it, max_num_seqs or max_model_len."
        ) from error


def _read_source(args: EngineArgs, platform: Platform) -> _Source:
    folder = resolve_folder(args.model, args.revision, weights=args.load_format != "dummy")
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face model folder?")
    raw = dict(read_json(path, limit_bytes=_CONFIG_BYTES))
    raw.update(args.hf_overrides or {})
    quantization = resolve_quantization(args.quantization, args.calibration, folder, raw)
    raw = without_quantization_keys(raw, quantization)
    reader = ConfigReader(raw)
    model_class = resolve_model(list(raw.get("architectures") or []), reader.family)
    model = model_class.read_config(reader)
    checkpoint = None if args.load_format == "dummy" else Checkpoint.open(folder)
    is_quantized = quantization.config is not None and not quantization.on_load
    # The floats of a quantized checkpoint are mostly scales, whose type says nothing of the model.
    stored = reader.dtype() if checkpoint is None or is_quantized else _stored_dtype(checkpoint)
    computes_in = platform.supported_dtypes()
    dtype, _ = resolve_dtype("dtype", args.dtype, computes_in[0], tuple({*computes_in, *DTYPES.values()}))
    # A type that this platform does not compute in is that of the weights: half the bytes, and no less exact.
    store_as = None if dtype in computes_in else dtype
    dtype = computes_in[0] if store_as else dtype
    return _Source(folder, model_class, model, reader, checkpoint, dtype, store_as or stored, store_as, quantization)


def _dtype_reason(args: EngineArgs, source: _Source, kernels: KernelSet) -> str:
    if source.store_as is torch.bfloat16 and kernels.library is not None and kernels.library.has_tiles:
        return f"{args.dtype}; matrix products read activations rounded to bfloat16, everything else is float32"
    return f"{args.dtype}; activations and accumulation are float32 on a CPU"


def _weight_dtype_reason(args: EngineArgs, source: _Source) -> str:
    if source.store_as:
        return f"asked for by dtype={args.dtype}: a CPU stores matrices in it and adds in float32"
    return "as the checkpoint stores them" if source.checkpoint else "config.json"


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating type that most bytes of the checkpoint are in."""
    sizes: Counter[torch.dtype] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in DTYPES.values():
            sizes[info.dtype] += info.nbytes
    if not sizes:
        raise CheckpointError("the checkpoint holds no float32, bfloat16 or float16 tensors.")
    return sizes.most_common(1)[0][0]


def _resolve(
    args: EngineArgs, source: _Source, platform: Any, compilation: CompilationConfig, kernels: KernelSet
) -> tuple[EngineConfig, list[KVCacheSpec]]:
    """Every decision, with its reason."""
    invariant, invariant_reason = kernels.invariant
    kv_types = tuple(DTYPES.values())
    kv_dtype, kv_reason = resolve_dtype("kv_cache_dtype", args.kv_cache_dtype, source.weight_dtype, kv_types)
    specs = kv_cache_specs(platform, source.model_class.kv_cache_specs(source.model, kv_dtype))
    free = platform.memory_free()
    memory = _plan_memory(args, source, specs, free)
    scheduler, reasons = plan_scheduler(args, memory.max_model_len, free)
    reasons |= memory.reasons | {
        "dtype": _dtype_reason(args, source, kernels),
        "weight_dtype": _weight_dtype_reason(args, source),
        "kv_cache_dtype": "the weights' type" if kv_reason == "auto" else kv_reason,
        "invariant": invariant_reason,
        "model_type": "config.json",
        "architecture": "registered for config.json's architectures or model_type",
        "mode": "operations that are off are compiled one by one" if compilation.compiles else "nothing is compiled",
        "backend": "of what is compiled",
        "custom_ops": f"operations that it does not name: {compilation.base_mode}",
        "vocab_size": "config.json",
        "tokenizer": "the model's own" if args.tokenizer is None else "asked for",
    }
    reasons["max_model_len"] += _rope_note(source.model, memory.max_model_len)
    for name in _TAKEN_AS_THEY_ARE:
        reasons[name] = args.why(name)
    reasons["quantization"] = source.quantization.reason
    seed = args.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
        reasons["seed"] = "drawn at start, for seed=None"
    model = ModelConfig(
        model=str(args.model),
        tokenizer=str(args.tokenizer or args.model),
        model_type=source.reader.family,
        architecture=source.model_class.__name__,
        dtype=source.dtype,
        weight_dtype=source.weight_dtype,
        max_model_len=memory.max_model_len,
        vocab_size=source.model.vocab_size,
        quantization=source.quantization.name,
        load_format=args.load_format,
        max_logprobs=args.max_logprobs,
        logprobs_mode=args.logprobs_mode,
        seed=seed,
        revision=args.revision,
    )
    cache = CacheConfig(
        block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        num_blocks=memory.num_blocks,
        kv_cache_memory_bytes=memory.kv_cache_memory_bytes,
        kv_cache_dtype=kv_dtype,
        enable_prefix_caching=args.enable_prefix_caching,
    )
    config = EngineConfig(
        model, cache, scheduler, platform.device_type, invariant, compilation, reasons, source.quantization.config
    )
    return config, specs


def _rope_note(model: Any, max_model_len: int) -> str:
    """What `max_model_len` decided about ropes whose frequencies depend on it, for short prompts too."""
    ropes = {layer.rope for layer in getattr(model, "layers", ()) if getattr(layer, "rope", None) is not None}
    for rope in ropes:
        original = rope.original_max_position_embeddings
        if rope.rope_type == "longrope":
            side = ("long", "beyond") if max_model_len > original else ("short", "within")
            return f"; LongRoPE's {side[0]} factors, for it is {side[1]} the original {original}"
        if rope.rope_type == "dynamic":
            return "; the dynamic rope is scaled for this length once"
    return ""


def _plan_memory(args: EngineArgs, source: _Source, specs: list[KVCacheSpec], free: int) -> MemoryPlan:
    weights = _weight_bytes(source)
    if weights > free:
        raise OutOfMemoryError(
            f"the weights take {weights} bytes and {free} are free; free memory, pass quantization= to make them "
            "smaller while they are read, or choose a smaller model."
        )
    return plan_memory(
        bytes_per_token=sum(spec.bytes_per_token() for spec in specs),
        block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        max_num_seqs=args.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        max_model_len=args.max_model_len,
        longest=source.model.max_position_embeddings,
        requested_bytes=args.kv_cache_memory_bytes,
        free_bytes=free - weights,
    )


def _weight_bytes(source: _Source) -> int:
    """What the weights will take once they are loaded; at least, when they are quantized while they are read."""
    if source.checkpoint is None:
        return 0
    config = source.quantization.config
    tensors = source.checkpoint.tensors.values()
    if not isinstance(config, OnlineConfig):
        return sum(
            math.prod(info.shape) * stored_as(info.dtype, len(info.shape), source.store_as).itemsize for info in tensors
        )
    return config.expected_bytes([(info.shape, info.nbytes) for info in tensors])


def _tokenizer(args: EngineArgs, folder: Path) -> Tokenizer | None:
    if args.skip_tokenizer_init:
        return None
    where = folder if args.tokenizer is None else resolve_folder(args.tokenizer, weights=False, argument="tokenizer")
    return Tokenizer(where, args.chat_template)


def _generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path, limit_bytes=_CONFIG_BYTES) if path.exists() else {}


def _eos_token_ids(reader: ConfigReader, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS of config.json and of generation_config.json together."""
    return (*reader.eos_token_ids(), *ConfigReader(generation, "generation_config.json").eos_token_ids())


def _default_params(args: EngineArgs, generation: Mapping[str, Any]) -> SamplingParams:
    """What `generate` uses when it is given no params: the model's generation_config.json, unless told not to."""
    if args.generation_config == "vllm":
        return SamplingParams()
    names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        given["max_tokens"] = generation["max_new_tokens"]
    try:
        params = SamplingParams(**given)
        params.set_from("generation_config.json", **{name: getattr(params, name) for name in given})
        return params
    except ValidationError as error:
        raise CheckpointError(
            f"generation_config.json of the model is not usable ({error}); pass generation_config='vllm' to do without."
        ) from error
