"""The paths under which code for vLLM imports what is defined elsewhere here, with `llm` for `vllm`.

`PATHS` says which module has which names, and from where they come; modules of these paths are made when they are
imported, and look a name up when it is asked for. What vLLM has at a path and this package has not is refused in
a sentence (`NAMES`, `MODULES`). Type checkers read the `.pyi` files of those paths that vLLM's documents name; a test
holds them to the table.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

# Path -> {defining module: its names there, or name=name at this path}.
PATHS: Mapping[str, Mapping[str, str]] = {
    "llm.api": {  # not vLLM's: where this package's documents had them
        "llm.llm": "EMBEDDED_MODEL LLM",
    },
    "llm.attention.layers.mm_encoder_attention": {
        "llm.layers.vision": "MMEncoderAttention",
    },
    "llm.beam_search": {
        "llm.outputs": "BeamSearchOutput BeamSearchSequence",
        "llm.sampling_params": "BeamSearchParams",
    },
    "llm.distributed": {
        "llm.base.command_line": "cleanup_dist_env_and_memory",
    },
    "llm.distributed.parallel_state": {
        "llm.base.command_line": "cleanup_dist_env_and_memory",
    },
    "llm.engine.arg_utils": {
        "llm.config.engine_args": "AsyncEngineArgs EngineArgs",
    },
    "llm.engine.model_runner": {  # a class path that platforms of plugins name
        "llm.runner.model_runner": "ModelRunner",
    },
    "llm.engine.async_llm_engine": {
        "llm.async_llm": "AsyncLLM=AsyncLLMEngine",
    },
    "llm.entrypoints.llm": {
        "llm.llm": "LLM",
    },
    "llm.exceptions": {
        "llm.errors": "ValidationError=VLLMValidationError",
    },
    "llm.logprobs": {
        "llm.outputs": "FlatLogprobs Logprob",
    },
    "llm.lora.request": {
        "llm.inputs": "LoRARequest",
    },
    "llm.model_executor.custom_op": {
        "llm.base.custom_op": "CustomOp PluggableLayer op_registry op_registry_oot",
    },
    "llm.model_executor.layers.activation": {
        "llm.layers.activation": (
            "FastGELU FatreluAndMul GELU XIELU GeluAndMul GeluAndMulSparse GELUTanh MulAndSilu NewGELU QuickGELU "
            "ReLUSquaredActivation SiluAndMul SiluAndMulWithClamp SwigluOAIAndMul SwigluStepAndMul"
        ),
    },
    "llm.model_executor.layers.attention": {
        "llm.layers.attention": "Attention",
        "llm.layers.vision": "MMEncoderAttention",
    },
    "llm.model_executor.layers.attention.mm_encoder_attention": {
        "llm.layers.vision": "MMEncoderAttention",
    },
    "llm.model_executor.layers.conv": {
        "llm.layers.vision": "Conv2dLayer Conv3dLayer ConvLayerBase",
    },
    "llm.model_executor.layers.fused_moe": {
        "llm.layers.moe": (
            "FusedMoE FusedMoEModularMethod FusedMoEPrepareAndFinalize GateLinear GroupedTopk UnquantizedFusedMoEMethod"
        ),
        "llm.quantization.base": "FusedMoEMethodBase",
    },
    "llm.model_executor.layers.layernorm": {
        "llm.layers.norm": "GemmaRMSNorm LayerNorm RMSNorm RMSNormGated",
    },
    "llm.model_executor.layers.linear": {
        "llm.layers.linear": (
            "ColumnParallelLinear LinearBase MergedColumnParallelLinear QKVParallelLinear ReplicatedLinear "
            "RowParallelLinear"
        ),
        "llm.quantization.base": "LinearMethodBase",
        "llm.quantization.unquantized": "UnquantizedLinearMethod",
    },
    "llm.model_executor.layers.logits_processor": {
        "llm.layers.embedding": "LogitsLayer=LogitsProcessor",
    },
    "llm.model_executor.layers.mamba.abstract": {
        "llm.layers.mamba": "MambaBase",
    },
    "llm.model_executor.layers.mamba.mamba_mixer": {
        "llm.layers.mamba": "MambaMixer",
    },
    "llm.model_executor.layers.mamba.mamba_mixer2": {
        "llm.layers.mamba": "MambaMixer2",
        "llm.layers.norm": "Mixer2RMSNormGated",
    },
    "llm.model_executor.layers.mamba.short_conv": {
        "llm.layers.mamba": "ShortConv",
    },
    "llm.model_executor.layers.mla": {
        "llm.layers.latent_attention": "MLAModules MultiHeadLatentAttentionWrapper",
    },
    "llm.model_executor.layers.quantization": {
        "llm.quantization.base": "QuantizationConfig",
        "llm.quantization.registry": "get_quantization_config register_quantization_config",
    },
    "llm.model_executor.layers.quantization.base_config": {
        "llm.quantization.base": "QuantizationConfig QuantizeMethodBase",
    },
    "llm.model_executor.layers.quantization.input_quant_fp8": {
        "llm.layers.quant_fp8": "QuantFP8",
    },
    "llm.model_executor.layers.rotary_embedding": {
        "llm.layers.rotary": (
            "ApplyRotaryEmb DualChunkRotaryEmbedding RotaryEmbedding RotaryEmbedding=RotaryEmbeddingBase"
        ),
    },
    "llm.model_executor.layers.rotary_embedding.base": {
        "llm.layers.rotary": "RotaryEmbedding RotaryEmbedding=RotaryEmbeddingBase",
    },
    "llm.model_executor.layers.rotary_embedding.common": {
        "llm.layers.rotary": "ApplyRotaryEmb",
    },
    "llm.model_executor.layers.vocab_parallel_embedding": {
        "llm.layers.embedding": "ParallelLMHead VocabParallelEmbedding",
        "llm.quantization.unquantized": "UnquantizedEmbeddingMethod",
    },
    "llm.model_executor.models.deepencoder": {
        "llm.layers.vision": "RelPosAttention",
    },
    "llm.model_executor.models.deepencoder2": {
        "llm.layers.qwen2_decoder": "CustomQwen2Decoder",
    },
    "llm.utils": {
        "llm.base.command_line": "FlexibleArgumentParser random_uuid",
        "llm.plugins": "resolve_obj_by_qualname",
    },
    "llm.utils.argparse_utils": {
        "llm.base.command_line": "FlexibleArgumentParser",
    },
    "llm.utils.import_utils": {
        "llm.plugins": "resolve_obj_by_qualname",
    },
    "llm.v1.engine.async_llm": {
        "llm.async_llm": "AsyncLLM",
    },
    "llm.v1.metrics.reader": {
        "llm.outputs": "Counter Gauge Histogram Metric Vector",
    },
    "llm.v1.sample.logits_processor": {
        "llm.plugins": "LOGITS_PROCESSORS=LOGITSPROCS_GROUP",
        "llm.sampling.logits_processors": (
            "AdapterLogitsProcessor AddedRequest BatchUpdate BatchUpdateBuilder LogitsProcessor "
            "MoveDirectionality MovedRequest RemovedRequest RequestLogitsProcessor process_dict_updates"
        ),
        "llm.sampling.logits_processors.builtin": (
            "LogitBiasLogitsProcessor MinPLogitsProcessor MinTokensLogitsProcessor"
        ),
        "llm.sampling.logits_processors.pipeline": "LogitsProcessors",
    },
    "llm.v1.sample.logits_processor.builtin": {
        "llm.sampling.logits_processors.builtin": (
            "LogitBiasLogitsProcessor MinPLogitsProcessor MinTokensLogitsProcessor"
        ),
        "llm.sampling.logits_processors.interface": "process_dict_updates",
    },
    "llm.v1.sample.logits_processor.interface": {
        "llm.sampling.logits_processors.interface": (
            "AddedRequest BatchUpdate LogitsProcessor MoveDirectionality MovedRequest RemovedRequest"
        ),
    },
    "llm.v1.sample.logits_processor.state": {
        "llm.sampling.logits_processors.interface": "BatchUpdateBuilder",
    },
}

_ASYNC = "llm.AsyncLLM is the engine for asyncio, and asyncio has the rest"
_ENGINE = "an LLM drives its engine itself; pass all prompts to one call of LLM.generate"
_GROUPS = "LLM(tensor_parallel_size=) starts the ranks, and llm.layers.parallel gathers between them"
_ADAPTERS = "adapters are enabled by LLM(enable_lora=True), and llm.layers.lora adds them to a layer"
_EXPERTS = "a layer of experts is an llm.layers.moe.FusedMoE, and its router an llm.layers.moe.TopKRouter"
_MIXERS = "mixers are in llm.layers.latent_attention, llm.layers.linear_attention and llm.layers.mamba"
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
    "SituAndMul HpcRopeNorm MiniMaxText01RMSNormTP FusedMMInputNorm NemotronLayerNorm1P VitMropeSetup"
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
    **dict.fromkeys(_DISTRIBUTED, _GROUPS),
    **dict.fromkeys(("make_async", "merge_async_iterators"), _ASYNC),
    **dict.fromkeys(_UTILITIES, _OWN),
    "set_current_vllm_config": "operations are bound by llm.base.construction.constructing_for(platform, compilation)",
}

# Modules of vLLM, with `llm` for `vllm`.
MODULES: dict[str, str] = {
    "llm.attention.backends": "an attention backend is an llm.layers.attention.AttentionBackend",
    "llm.attention.layer": "Attention is in llm.model_executor.layers.attention",
    "llm.distributed.device_communicators": _GROUPS,
    "llm.engine.llm_engine": "LLMEngine is imported from llm",
    "llm.entrypoints.openai": "the endpoint is `python -m llm serve`, or llm.serve() in this process",
    "llm.envs": "environment variables are in llm.config.env",
    "llm.lora.layers": _ADAPTERS,
    "llm.lora.models": _ADAPTERS,
    "llm.model_executor.layers.fla": _MIXERS,
    "llm.model_executor.layers.fused_moe.config": _EXPERTS,
    "llm.model_executor.layers.fused_moe.layer": _EXPERTS,
    "llm.model_executor.model_loader": "checkpoints are read by llm.loading",
    "llm.model_executor.models.*": "models are in llm.models, and register_model is imported from llm",
    "llm.multimodal": _TEXT,
    "llm.transformers_utils": "tokenizers and chat templates are in llm.text.tokenizer",
    "llm.utils.async_utils": _ASYNC,
    "llm.utils.torch_utils": _OWN,
    "llm.v1.core": "the scheduler and the blocks are in llm.engine",
    **dict.fromkeys(("llm.v1.engine.core", "llm.v1.engine.llm_engine"), _ENGINE),
    "llm.v1.worker": "the model runner is llm.runner.model_runner.ModelRunner",
    "llm.worker": "the model runner is llm.runner.model_runner.ModelRunner",
}


def names_of(path: str) -> dict[str, tuple[str, str]]:
    """Name at `path` -> (the module that defines it, its name there)."""
    found = {}
    for module, names in PATHS[path].items():
        for item in names.split():
            own, _, name = item.partition("=")
            found[name or own] = (module, own)
    return found


# Paths that have others below them, and are no package of this library.
PACKAGES = frozenset(
    above
    for path in [*PATHS, *MODULES]
    for count in range(1, path.count("."))
    if (above := path.rsplit(".", count)[0]) != "llm.engine"
)


def missing_name(module: str, name: str) -> Exception:
    """The error for a module's `__getattr__`: an ImportError that says what to do instead, or an AttributeError."""
    instead = NAMES.get(name) or MODULES.get(f"{module}.{name}")
    if instead is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module} has no {name}; {instead}.", name=module)


def missing_names(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for `module`. Hide it from type checkers: with it, mypy accepts any name of the module."""

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(module, name)

    return __getattr__


class _Finder:
    """Finds the modules of `PATHS`, and says of those in `MODULES` what to do instead."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith("llm."):
            return None
        is_package = fullname in PACKAGES
        if is_package or fullname in PATHS:
            return ModuleSpec(fullname, _Loader, is_package=is_package)  # type: ignore[arg-type]
        parent = fullname.rpartition(".")[0]
        instead = MODULES.get(fullname) or MODULES.get(f"{parent}.*")
        if instead is not None:
            raise ModuleNotFoundError(f"there is no {fullname}; {instead}.", name=fullname)
        return None


class _Loader:
    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        path = module.__name__
        names = names_of(path) if path in PATHS else {}
        module.__doc__ = f"`v{path}`: names that are defined elsewhere in this package."
        module.__all__ = sorted(names)  # type: ignore[attr-defined]

        def __getattr__(name: str) -> object:
            if name not in names:
                raise missing_name(path, name)
            defined_in, own = names[name]
            value = getattr(importlib.import_module(defined_in), own)
            setattr(module, name, value)
            return value

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def install() -> None:
    """Called once, by `llm/__init__.py`. First on the path: a folder of `.pyi` files would pass for a package."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def stub(path: str) -> str:
    """The text of a path's `.pyi` file."""
    lines = [
        f"from {module} import {own} as {name}"
        for name, (module, own) in sorted(names_of(path).items(), key=lambda item: (item[1], item[0]))
    ]
    return "\n".join([f"# ruff: noqa\n# Of llm.base.vllm_paths: what `{path}` has at run time.", *lines, ""])
