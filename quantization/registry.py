"""Which class reads a checkpoint format, and which computes a scheme.

Names registered by plugins come before the built-in ones, so a plugin may replace one. Built-in classes are given as
"module:Class" and imported at first use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from llm.errors import LLMError, ValidationError, nearest
from llm.quantization.base import QuantizationConfig
from llm.quantization.schemes import SCHEMES, IntegerMethod

C = TypeVar("C", bound=type)

_BUILTIN_CONFIGS: dict[str, str] = {
    "compressed-tensors": "llm.quantization.formats.compressed_tensors:CompressedTensorsConfig",
    "ascend": "llm.quantization.formats.modelslim:ModelSlimConfig",
    "gguf": "llm.quantization.formats.gguf:GGUFConfig",
    "gptq": "llm.quantization.formats.gptq:GPTQConfig",
    "awq": "llm.quantization.formats.gptq:AWQConfig",
    "fp8": "llm.quantization.formats.floats:Fp8Config",
    "mxfp4": "llm.quantization.formats.floats:Mxfp4Config",
    "bitsandbytes": "llm.quantization.formats.bitsandbytes:BitsAndBytesConfig",
}
# Other names of the same formats.
ALIASES = {"modelslim": "ascend", "gptq_marlin": "gptq", "awq_marlin": "awq"}
# The values of a layer's `quant_kind`.
KINDS = ("linear", "embedding", "moe", "attention")


_plugin_configs: dict[str, type[QuantizationConfig]] = {}
_plugin_schemes: dict[tuple[str, str], type] = {}


def register_quantization_config(name: str) -> Callable[[C], C]:
    """Class decorator: register a `QuantizationConfig` as `quantization=name`; it replaces a built-in one.

    Raises `ValidationError` if the class is no `QuantizationConfig`.
    """

    def decorate(config_class: C) -> C:
        if not (isinstance(config_class, type) and issubclass(config_class, QuantizationConfig)):
            raise ValidationError(
                f"register_quantization_config({name!r}) takes a subclass of QuantizationConfig, got {config_class!r}.",
                parameter="config_class",
                value=config_class,
            )
        _plugin_configs[name] = config_class
        return config_class

    return decorate


def quantization_methods() -> tuple[str, ...]:
    """The names of all checkpoint formats, plugins first."""
    return tuple(dict.fromkeys([*_plugin_configs, *_BUILTIN_CONFIGS]))


def builtin_methods() -> tuple[str, ...]:
    """The same without plugins."""
    return tuple(_BUILTIN_CONFIGS)


def plugin_configs() -> dict[str, type[QuantizationConfig]]:
    """The plugins' configs, in order of registration."""
    return dict(_plugin_configs)


def get_quantization_config(name: str) -> type[QuantizationConfig]:
    """The class for a format; raises `ValidationError`, which lists the known names, for an unknown one."""
    if name in _plugin_configs:
        return _plugin_configs[name]
    name = ALIASES.get(name, name)
    if name in _BUILTIN_CONFIGS:
        module, _, attribute = _BUILTIN_CONFIGS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    known = quantization_methods()
    raise ValidationError(
        f"quantization={name!r} is not known.{nearest(name, known)} Known: {', '.join(known) or 'none'}.",
        parameter="quantization",
        value=name,
    )


def register_scheme(quant_type: str, kind: str) -> Callable[[C], C]:
    """Class decorator: register a scheme for layers of `kind` ("linear", "embedding", "moe", "attention").

    Args:
        quant_type: as a ModelSlim checkpoint's description file spells it, e.g. "W8A8_DYNAMIC".

    It replaces a built-in scheme. Raises `ValidationError` for an unknown kind, and `LLMError` if another class is
    registered for the same type and kind.
    """
    if kind not in KINDS:
        raise ValidationError(
            f"register_scheme: kind={kind!r} is not known.{nearest(str(kind), KINDS)} Known: {', '.join(KINDS)}.",
            parameter="kind",
            value=kind,
        )

    def decorate(scheme_class: C) -> C:
        taken = _plugin_schemes.get((quant_type, kind))
        # Running a notebook cell again defines its class again.
        if taken is not None and _full_name(taken) != _full_name(scheme_class):
            raise LLMError(
                f"a scheme for {quant_type} {kind} layers is already registered: {_full_name(taken)}; "
                f"{_full_name(scheme_class)} cannot be another."
            )
        _plugin_schemes[quant_type, kind] = scheme_class
        return scheme_class

    return decorate


def get_scheme(quant_type: str, kind: str) -> Any:
    """A function from (storage, source, reason) to a layer's method, a plugin's first; None if the type has none."""
    plugin = _plugin_schemes.get((quant_type, kind))
    row = SCHEMES.get(quant_type)
    if plugin is not None or row is None or kind not in row.layers:
        return plugin
    return functools.partial(IntegerMethod, row)


def scheme_types(kind: str) -> tuple[str, ...]:
    """The types that have a scheme for layers of `kind`."""
    plugins = [quant_type for quant_type, its_kind in _plugin_schemes if its_kind == kind]
    return tuple(dict.fromkeys([*plugins, *(name for name, row in SCHEMES.items() if kind in row.layers)]))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
