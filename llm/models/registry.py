"""Which class computes which architecture.

Owns the static table by `model_type` and by architecture name, and `register_model` for users' own classes. A class may
be given as "module:Class"; it is imported when first needed.
"""

from __future__ import annotations

import importlib
from typing import Any

from llm.base.text import show
from llm.errors import UnsupportedModelError, ValidationError
from llm.models.way_out import of_architecture, of_head

# model_type -> the class in the file of that name. Architectures are known by the class's name.
_FAMILIES = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bamba": "BambaForCausalLM",
    "bloom": "BloomForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mellum": "MellumForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "plamo2": "Plamo2ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}

# The same for models that do not generate: tokens see those after them. Architectures are any that their class reads.
_ENCODERS: dict[str, str] = {
    "bert": "llm.models.bert:BertModel",
    "distilbert": "llm.models.distilbert:DistilBertModel",
    "modernbert": "llm.models.modernbert:ModernBertModel",
    "nomic_bert": "llm.models.nomic_bert:NomicBertModel",
    "roberta": "llm.models.roberta:RobertaModel",
    "xlm-roberta": "llm.models.roberta:RobertaModel",
}

# Some of the first checkpoints spell theirs with other capitals ("LLaMAForCausalLM").
_SPELLINGS = {cls.lower(): cls for cls in _FAMILIES.values()}

_models: dict[str, Any] = {
    name: f"llm.models.{family}:{cls}" for family, cls in _FAMILIES.items() for name in (family, cls)
}


def register_model(name: str, model: Any) -> None:
    """Make `model` (a class, or "module:Class") serve checkpoints whose architecture or model_type is `name`.

    A registration replaces a built-in one. The class implements `llm.models.interface.CausalLM`.
    Raises `ValidationError` when `model` is neither a class nor such a string.
    """
    if isinstance(model, str) and model.count(":") == 1:
        _models[name] = model
    elif isinstance(model, type):
        _check_interface(model)
        _models[name] = model
    else:
        raise ValidationError(
            f"register_model({name!r}, ...) takes a class or 'module:Class', got {model!r}.",
            parameter="model",
            value=model,
        )


def resolve_model_cls(architectures: list[str], model_type: str) -> Any:
    """The class for a checkpoint: by architecture first, then by model_type.

    An architecture that is not known is another use of the same layers (a classifier, an embedder) as long as nobody
    registered the model_type; it raises `UnsupportedModelError`, as an unknown model_type does.
    """
    for name in architectures:
        found = _models.get(name) or _models.get(_SPELLINGS.get(name.lower(), ""))
        if found:
            return _load(found)
    cls = _FAMILIES.get(model_type)
    if architectures and cls and _models[model_type] == f"llm.models.{model_type}:{cls}":
        raise UnsupportedModelError(
            f"architectures {show(architectures)} of model_type {show(model_type)} is not supported"
            f"{of_head(architectures[0], cls)}."
        )
    if model_type in _models:
        return _load(_models[model_type])
    own = [name for name in _models if name not in _FAMILIES and name not in _FAMILIES.values()]
    raise UnsupportedModelError(
        f"model_type {show(model_type)} (architectures {show(architectures)}) is not supported"
        f"{of_architecture(architectures, model_type, [*_FAMILIES, *own])}."
    )


def is_known(architecture: str) -> bool:
    """True if a class here generates with this architecture, or is registered for it."""
    return architecture in _models or architecture.lower() in _SPELLINGS


def is_encoder(model_type: str) -> bool:
    """True if the models of this type do not generate; unless a user registered a class for it."""
    return model_type in _ENCODERS and model_type not in _models


def resolve_pooling_cls(model_type: str) -> type:
    """The class whose hidden states are pooled, whatever the checkpoint's architecture is."""
    place = _ENCODERS.get(model_type) if is_encoder(model_type) else _models.get(model_type)
    if place is None:
        hint = of_architecture([], model_type, [*_FAMILIES, *_ENCODERS])
        raise UnsupportedModelError(f"model_type {show(model_type)} is not supported{hint}.")
    found: type = _load(place)
    return found


def _load(model: Any) -> Any:
    if not isinstance(model, str):
        return model
    module, _, name = model.partition(":")
    loaded = getattr(importlib.import_module(module), name)
    _check_interface(loaded)
    return loaded


def _check_interface(model: type) -> None:
    needed = ("read_config", "kv_cache_specs", "embed", "forward", "compute_logits")
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise ValidationError(
            f"{model.__name__} cannot serve as a model: it has no {', '.join(missing)} (see llm.models.interface).",
            parameter="model",
            value=model,
        )


class ModelRegistry:
    """vLLM's name for the same: `ModelRegistry.register_model(arch, cls)`."""

    register_model = staticmethod(register_model)

    @staticmethod
    def get_supported_archs() -> list[str]:
        return sorted(_models)
