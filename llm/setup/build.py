"""The order of start-up: read the model folder, plan, let the runner build and load the model, make the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from llm.base.construction import PhaseTimes
from llm.base.library_settings import library_defaults
from llm.config.compilation import CompilationConfig
from llm.config.engine import LLMArgs
from llm.engine.boundary import RunnerPlan
from llm.engine.engine import Engine
from llm.engine.scheduler import scheduler_maker
from llm.errors import ValidationError
from llm.kernels.select import backend_for
from llm.layers.parallel import TensorParallel
from llm.platforms import Platform, select_platform
from llm.platforms.limits import explain_memory_errors
from llm.plugins import load_class, load_general_plugins
from llm.quantization.on_load import OnlineConfig
from llm.replicas.placement import of_nodes, placements
from llm.replicas.start import check_replicated, memory_of_one, start_replicas
from llm.runner.layerwise import LayerwiseRunner
from llm.runner.model_runner import ModelRunner
from llm.sampling.logits_processors.pipeline import load_logits_processors
from llm.sampling_params import SamplingParams
from llm.setup.calibrate import calibrate, own_texts
from llm.setup.drafts import draft_args, eagle3_args, read_eagle3, with_draft, with_eagle3
from llm.setup.extensions import (
    check_operations,
    check_quantization,
    let_platform_update,
    reasons_of_update,
    without_broken_platforms,
)
from llm.setup.memory import ANY_MEMORY, merged_adapter
from llm.setup.model_folder import (
    ReadModel,
    default_params,
    eos_token_ids,
    generation_defaults,
    read_model,
    read_tokenizer,
)
from llm.setup.plan import (
    choose_dtypes,
    make_plan,
    warn_of_offload,
    weight_bytes_in_memory,
    with_reasons,
    with_sampling_defaults,
)
from llm.setup.ranks import check_ranks, memory_of_rank, place_ranks, reasons_of_ranks, start_ranks

# Texts of calibration="auto".
_WRITTEN_AT_ONCE = 8


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, and what its model was built from.

    Attributes:
        default_params: the params of `generate` if it gets none.
        startup: seconds per phase.
        shared_bytes: of weights that other processes have in the same memory.
    """

    engine: Engine
    plan: RunnerPlan
    default_params: SamplingParams
    startup: PhaseTimes
    shared_bytes: int = 0


@without_broken_platforms
@library_defaults()
@explain_memory_errors("load the model")
def build_engine(args: LLMArgs, shared_weights: int | None = None) -> BuiltEngine:
    """Build and load; raises the errors of `llm.errors`, before memory is allocated if possible.

    Args:
        shared_weights: of a replica, as in `RunnerPlan`; who started it has looked at the memory.
    """
    times = PhaseTimes()
    places = placements(args)
    if places:
        check_replicated(args)
    with times.phase("read config"):
        devices = place_ranks(args, places)
        platform, platform_reason, asked = select_platform(devices[0])[0], select_platform(args.device)[1], args
        load_general_plugins()
        args = let_platform_update(platform, args)
        check_ranks(args, platform)
        compilation = CompilationConfig.of(
            args.compilation_config,
            default_backend=platform.simple_compile_backend,
            enforce_eager=args.enforce_eager,
        ).with_base_mode()
        processors = load_logits_processors(args.logits_processors)
        model = read_model(args)
        check_operations(compilation)
        sources = [model.source]
    try:
        model = _prepare_quantization(args, model, platform, compilation, times, calibrates=not places)
        with times.phase("tokenizer"):
            tokenizer = read_tokenizer(args, model.source)
            generation = generation_defaults(args, model.source)
            eos, defaults = eos_token_ids(model.reader, generation), default_params(args, generation)
        with times.phase("load kernels"):
            backend = backend_for(platform)
        with times.phase("plan"):
            heading, head = eagle3_args(args), None
            if heading is not None:
                head = read_eagle3(heading, model)
                sources.append(head.source)
                _check_quantization(heading, head, platform)
            free, weights = None if shared_weights is None else ANY_MEMORY, 0
            if free is None and not places:
                free = memory_of_rank(platform, devices)
            if places:
                weights = weight_bytes_in_memory(args, model, platform)
                free = memory_of_one(platform, places, platform.memory_free(), weights)
            tp = TensorParallel(0, args.tensor_parallel_size)
            plan = make_plan(args, model, platform, compilation, backend, processors, tp, free=free, head=head)
            warn_of_offload(args, plan)
            plan = replace(plan, merge_lora=merged_adapter(args, model), shared_weights=shared_weights)
            plan = with_sampling_defaults(plan, defaults)
            plan = with_reasons(plan, {"device": platform_reason, **reasons_of_update(platform, asked, args)})
            plan = with_reasons(plan, reasons_of_ranks(platform, devices))
            if not places and plan.tp_size == 1 and platform.device_type == "cpu":
                threads = plan.config.reasons["num_threads"] + of_nodes(args.num_threads)
                plan = with_reasons(plan, {"num_threads": threads})
            drafting = draft_args(args, plan)
            if drafting is not None:
                draft = read_model(drafting)
                sources.append(draft.source)
                _check_quantization(drafting, draft, platform)
                plan = with_draft(plan, drafting, draft, tokenizer, platform, backend)
            if heading is not None and head is not None:
                plan = with_eagle3(plan, heading, head, platform, backend)
        if places:
            engine, plan, seconds = start_replicas(args, plan, platform, places, weights, tokenizer, eos)
            times.add(seconds)
            return BuiltEngine(engine, plan, defaults, times)
        runner = make_runner(platform) if plan.tp_size == 1 else start_ranks(args, plan, platform, devices)
        loaded = runner.load(plan)
        times.add(loaded.seconds)
    finally:
        for source in sources:
            source.close()
    plan = replace(plan, config=loaded.applied_to(plan.config))
    engine = Engine(plan.config, scheduler_maker(plan), runner, tokenizer, eos)
    return BuiltEngine(engine, plan, defaults, times, loaded.shared_bytes)


def make_runner(platform: Platform) -> ModelRunner:
    """The platform's runner, not loaded; raises `PluginError` if the platform names a class that is none."""
    who = f"{type(platform).__name__}.get_model_runner_cls"
    return load_class(platform.get_model_runner_cls(), ModelRunner, who, platform.plugin)(platform)


def _prepare_quantization(
    args: LLMArgs,
    model: ReadModel,
    platform: Platform,
    compilation: CompilationConfig,
    times: PhaseTimes,
    calibrates: bool,
) -> ReadModel:
    """Refuse quantization that the platform does not support; run calibration texts through unquantized layers."""
    _check_quantization(args, model, platform)
    config = model.quantization.config
    if not calibrates or not isinstance(config, OnlineConfig) or not config.uses_calibration:
        return model
    if model.pooling is not None and config.own_texts:
        raise ValidationError(
            "calibration='auto' lets a model write its own texts, and this one gives vectors or scores; pass "
            "texts like those that it will be given: calibration=[...].",
            parameter="calibration",
            value=args.calibration,
        )
    plain = replace(args, quantization=None, calibration=None, logits_processors=None)
    is_here = platform.device.type == "cpu" and type(make_runner(platform)) is ModelRunner
    with times.phase("calibrate"):
        texts: Sequence[str] | Sequence[Sequence[int]] = config.calibration
        if config.own_texts:
            writer = replace(plain, quantization="w8a8", max_num_seqs=_WRITTEN_AT_ONCE, kv_cache_dtype="bfloat16")
            texts = own_texts(lambda: build_engine(writer).engine, model.source, model.architecture.vocab_size)
        config.statistics, how = calibrate(
            lambda: build_engine(plain).engine,
            partial(_layerwise_engine, plain, platform, compilation) if is_here else None,
            texts,
            model.pooling,
            weight_bytes_in_memory(plain, read_model(plain), platform),
        )
    reason = f"{model.quantization.reason}; the calibration texts ran through {how}"
    return replace(model, quantization=replace(model.quantization, reason=reason))


@library_defaults()
def _layerwise_engine(args: LLMArgs, platform: Platform, compilation: CompilationConfig) -> Engine:
    """With a `LayerwiseRunner`, planned as if there were room for all weights: they are never all in memory."""
    args = replace(args, speculative_config=None, enable_lora=False, offload_weights=False)
    model = read_model(args)
    tokenizer = read_tokenizer(args, model.source)
    eos = eos_token_ids(model.reader, generation_defaults(args, model.source))
    free = platform.memory_free() + weight_bytes_in_memory(args, model, platform)
    plan = make_plan(args, model, platform, compilation, backend_for(platform), (), free=free)
    plan = replace(plan, merge_lora=merged_adapter(args, model))
    runner = LayerwiseRunner(platform)
    runner.load(plan)
    return Engine(plan.config, scheduler_maker(plan), runner, tokenizer, eos)


def _check_quantization(args: LLMArgs, model: ReadModel, platform: Platform) -> None:
    if model.quantization.config is not None:
        check_quantization(model.quantization.config, platform, choose_dtypes(args, model, platform).compute)
