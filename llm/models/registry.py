"""Which class computes which architecture: a static table, and `register_model` for users' own classes.

A class may be given as "module:Class"; it is imported when first needed.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from llm.base.text import show
from llm.errors import UnsupportedModelError, ValidationError

# model_type -> "file:Class". An architecture is known by the name of the class.
_FAMILIES = {
    "apertus": "llama:ApertusForCausalLM",
    "arcee": "llama:ArceeForCausalLM",
    "bamba": "mamba:BambaForCausalLM",
    "bloom": "gpt_neox:BloomForCausalLM",
    "codegen": "gpt_neox:CodeGenForCausalLM",
    "cohere": "cohere:CohereForCausalLM",
    "cohere2": "cohere:Cohere2ForCausalLM",
    "deepseek_v2": "deepseek:DeepseekV2ForCausalLM",
    "deepseek_v3": "deepseek:DeepseekV3ForCausalLM",
    "dots1": "deepseek:Dots1ForCausalLM",
    "ernie4_5": "llama:Ernie4_5ForCausalLM",
    "ernie4_5_moe": "llama:Ernie4_5_MoeForCausalLM",
    "exaone4": "exaone:Exaone4ForCausalLM",
    "exaone_moe": "exaone:ExaoneMoeForCausalLM",
    "falcon": "gpt_neox:FalconForCausalLM",
    "falcon_h1": "mamba:FalconH1ForCausalLM",
    "falcon_mamba": "mamba:FalconMambaForCausalLM",
    "flex_olmo": "olmo:FlexOlmoForCausalLM",
    "gemma": "gemma:GemmaForCausalLM",
    "gemma2": "gemma:Gemma2ForCausalLM",
    "gemma3": "gemma:Gemma3ForConditionalGeneration",
    "gemma3_text": "gemma:Gemma3ForCausalLM",
    "gemma3n": "gemma3n:Gemma3nForConditionalGeneration",
    "gemma3n_text": "gemma3n:Gemma3nForCausalLM",
    "gemma4": "gemma4:Gemma4ForConditionalGeneration",
    "gemma4_text": "gemma4:Gemma4ForCausalLM",
    "glm": "glm:GlmForCausalLM",
    "glm4": "glm:Glm4ForCausalLM",
    "glm4_moe": "glm:Glm4MoeForCausalLM",
    "glm4_moe_lite": "glm:Glm4MoeLiteForCausalLM",
    "gpt2": "gpt2:GPT2LMHeadModel",
    "gpt_bigcode": "gpt2:GPTBigCodeForCausalLM",
    "gpt_neo": "gpt2:GPTNeoForCausalLM",
    "gpt_neox": "gpt_neox:GPTNeoXForCausalLM",
    "gpt_oss": "gpt_oss:GptOssForCausalLM",
    "gptj": "gpt_neox:GPTJForCausalLM",
    "granite": "granite:GraniteForCausalLM",
    "granitemoe": "granite:GraniteMoeForCausalLM",
    "granitemoehybrid": "granite:GraniteMoeHybridForCausalLM",
    "granitemoeshared": "granite:GraniteMoeSharedForCausalLM",
    "helium": "llama:HeliumForCausalLM",
    "hunyuan_v1_dense": "hunyuan:HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "hunyuan:HunYuanMoEV1ForCausalLM",
    "hy_v3": "hunyuan:HYV3ForCausalLM",
    "hyperclovax": "llama:HyperCLOVAXForCausalLM",
    "internlm2": "llama:InternLM2ForCausalLM",
    "internlm3": "llama:InternLM3ForCausalLM",
    "jais2": "llama:Jais2ForCausalLM",
    "jamba": "mamba:JambaForCausalLM",
    "kimi_linear": "deepseek:KimiLinearForCausalLM",
    "lfm2": "lfm2:Lfm2ForCausalLM",
    "lfm2_moe": "lfm2:Lfm2MoeForCausalLM",
    "llama": "llama:LlamaForCausalLM",
    "llama4": "llama4:Llama4ForConditionalGeneration",
    "llama4_text": "llama4:Llama4ForCausalLM",
    "mamba": "mamba:MambaForCausalLM",
    "mamba2": "mamba:Mamba2ForCausalLM",
    "mellum": "qwen:MellumForCausalLM",
    "minicpm3": "deepseek:MiniCPM3ForCausalLM",
    "minimax_m2": "hunyuan:MiniMaxM2ForCausalLM",
    "ministral": "llama:MinistralForCausalLM",
    "ministral3": "llama:Ministral3ForCausalLM",
    "mistral": "llama:MistralForCausalLM",
    "mistral3": "llama:Mistral3ForConditionalGeneration",
    "mixtral": "llama:MixtralForCausalLM",
    "mpt": "gpt_neox:MptForCausalLM",
    "nanochat": "llama:NanoChatForCausalLM",
    "nemotron": "llama:NemotronForCausalLM",
    "nemotron_h": "mamba:NemotronHForCausalLM",
    "olmo": "olmo:OlmoForCausalLM",
    "olmo2": "olmo:Olmo2ForCausalLM",
    "olmo3": "olmo:Olmo3ForCausalLM",
    "olmo_hybrid": "olmo:OlmoHybridForCausalLM",
    "olmoe": "olmo:OlmoeForCausalLM",
    "opt": "gpt2:OPTForCausalLM",
    "persimmon": "gpt_neox:PersimmonForCausalLM",
    "phi": "phi:PhiForCausalLM",
    "phi3": "phi:Phi3ForCausalLM",
    "phimoe": "phi:PhimoeForCausalLM",
    "plamo2": "mamba:Plamo2ForCausalLM",
    "qwen2": "qwen:Qwen2ForCausalLM",
    "qwen2_5_vl": "qwen:Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "qwen:Qwen2MoeForCausalLM",
    "qwen2_vl": "qwen:Qwen2VLForConditionalGeneration",
    "qwen3": "qwen:Qwen3ForCausalLM",
    "qwen3_5": "qwen:Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "qwen:Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "qwen:Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "qwen:Qwen3_5ForCausalLM",
    "qwen3_moe": "qwen:Qwen3MoeForCausalLM",
    "qwen3_next": "qwen:Qwen3NextForCausalLM",
    "qwen3_vl": "qwen:Qwen3VLForConditionalGeneration",
    "seed_oss": "llama:SeedOssForCausalLM",
    "smollm3": "llama:SmolLM3ForCausalLM",
    "solar_open": "deepseek:SolarOpenForCausalLM",
    "stablelm": "llama:StableLmForCausalLM",
    "starcoder2": "llama:Starcoder2ForCausalLM",
    "vaultgemma": "gemma:VaultGemmaForCausalLM",
    "youtu": "deepseek:YoutuForCausalLM",
    "zamba2": "zamba2:Zamba2ForCausalLM",
}
_ARCHITECTURES = {family: place.partition(":")[2] for family, place in _FAMILIES.items()}

# The same for models that do not generate: tokens see those after them. Architectures are any that their class reads.
_ENCODERS = {
    "bert": "bert:BertModel",
    "distilbert": "bert:DistilBertModel",
    "modernbert": "bert:ModernBertModel",
    "nomic_bert": "bert:NomicBertModel",
    "roberta": "bert:RobertaModel",
    "xlm-roberta": "bert:RobertaModel",
}

# Some of the first checkpoints spell theirs with other capitals ("LLaMAForCausalLM").
_SPELLINGS = {cls.lower(): cls for cls in _ARCHITECTURES.values()}

_models: dict[str, Any] = {
    name: f"llm.models.{place}" for family, place in _FAMILIES.items() for name in (family, _ARCHITECTURES[family])
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
    cls = _ARCHITECTURES.get(model_type)
    if architectures and cls and _models[model_type] == f"llm.models.{_FAMILIES[model_type]}":
        raise UnsupportedModelError(
            f"architectures {show(architectures)} of model_type {show(model_type)} is not supported"
            f"{_advice_on_head(architectures[0], cls)}."
        )
    if model_type in _models:
        return _load(_models[model_type])
    own = [name for name in _models if name not in _FAMILIES and name not in _ARCHITECTURES.values()]
    raise UnsupportedModelError(
        f"model_type {show(model_type)} (architectures {show(architectures)}) is not supported"
        f"{_advice(architectures, model_type, [*_FAMILIES, *own])}."
    )


def is_known(architecture: str) -> bool:
    """True if a class here generates with this architecture, or is registered for it."""
    return architecture in _models or architecture.lower() in _SPELLINGS


def class_named(name: str) -> Any:
    """The class of this name here; None: there is none."""
    family = next((family for family, own in _ARCHITECTURES.items() if own == name), None)
    return None if family is None else _load(f"llm.models.{_FAMILIES[family]}")


def is_encoder(model_type: str) -> bool:
    """True if the models of this type do not generate; unless a user registered a class for it."""
    return model_type in _ENCODERS and model_type not in _models


def resolve_pooling_cls(model_type: str) -> type:
    """The class whose hidden states are pooled, whatever the checkpoint's architecture is."""
    place = f"llm.models.{_ENCODERS[model_type]}" if is_encoder(model_type) else _models.get(model_type)
    if place is None:
        hint = _advice([], model_type, [*_FAMILIES, *_ENCODERS])
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


# Reason -> parts of architecture names that imply it.
_REASONS = {
    "this mixture of experts is not here yet": ("moe", "deepseek", "gpt_oss"),
    "it takes images, audio or video, and prompts here are text": ("conditionalgeneration", "_vl", "vision"),
    "encoders with a decoder are not here": ("t5", "bart", "pegasus"),
    "this encoder is not here yet": ("bert", "electra"),
    "these recurrent layers are not here yet": ("rwkv",),
}


def _advice(architectures: Iterable[str], model_type: str, families: Iterable[str]) -> str:
    """The reason why there is no such family if its name implies one, then the nearest by name, then where all are."""
    families = sorted(families)
    text = " ".join([*architectures, model_type]).lower()
    why = next((f"; {reason}" for reason, parts in _REASONS.items() if any(part in text for part in parts)), "")
    close = difflib.get_close_matches(model_type, families, n=1)
    hint = f"; the nearest by name is {close[0]}" if close else ""
    listed = f"ModelRegistry.get_supported_archs() lists the {len(families)} families there are"
    return f"{why}{hint}; {listed}, and register_model() adds your own class"


# What an architecture's name says it is for -> what runs it.
_USES = {
    "forsequenceclassification": "LLM(model, runner='pooling') classifies and scores with it",
    "rewardmodel": "the code that came with the reward model scores",
    "fortokenclassification": "LLM(model, runner='pooling').encode labels tokens with it",
    "forquestionanswering": "transformers' AutoModelForQuestionAnswering answers from a text",
    "bidirectional": "sentence-transformers embeds texts",
}
_OTHER_USE = "transformers' AutoModel gives hidden states, and sentence-transformers embeds texts"


def _advice_on_head(architecture: str, supported: str) -> str:
    """For an architecture built on a family's layers that is not its language model, `supported`."""
    name = architecture.lower()
    instead = next((use for part, use in _USES.items() if part in name), _OTHER_USE)
    return (
        f": this use of the layers is not offered, the nearest supported architecture is {supported}; {instead}, "
        f"and if the weights are a causal language model's, pass hf_overrides={{'architectures': ['{supported}']}}"
    )
