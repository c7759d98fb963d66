"""Which class computes which architecture.

Owns the static table by `model_type` and by architecture name, and `register_model` for users' own classes. A class may
be given as "module:Class"; it is imported when first needed.
"""

from __future__ import annotations

import importlib
from typing import Any

from llm.base.errors import UnsupportedModelError, ValidationError
from llm.base.text import show
from llm.models.way_out import of_architecture

# model_type -> the class in the file of that name. Architectures are known by the class's name.
_FAMILIES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

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
    """The class for a checkpoint: by architecture first, then by model_type; unknown raises `UnsupportedModelError`."""
    for name in (*architectures, model_type):
        if name in _models:
            return _load(_models[name])
    own = [name for name in _models if name not in _FAMILIES and name not in _FAMILIES.values()]
    raise UnsupportedModelError(
        f"model_type {show(model_type)} (architectures {show(architectures)}) is not supported"
        f"{of_architecture(architectures, model_type, [*_FAMILIES, *own])}."
    )


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
