"""The start-up checks and calls that involve plugins and registries; `build.py` has their order.

Everything here runs before memory is allocated.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Concatenate, ParamSpec, TypeVar

import torch

import llm.layers
from llm.base.custom_op import check_registered, op_registry
from llm.config.compilation import CompilationConfig
from llm.config.engine import LLMArgs
from llm.errors import PluginError, ValidationError
from llm.forward import StateSpec
from llm.platforms import is_by_name
from llm.platforms.interface import Platform, supported_dtypes, update_config
from llm.plugins import leave_out
from llm.quantization.base import QuantizationConfig

P = ParamSpec("P")
T = TypeVar("T")


def without_broken_platforms(build: Callable[Concatenate[LLMArgs, P], T]) -> Callable[Concatenate[LLMArgs, P], T]:
    """Decorates start-up: with LLM_PLUGIN_ERRORS=warn, start again without a plugin's platform that has failed.

    An error of a platform that the user named is raised.
    """

    @functools.wraps(build)
    def started(args: LLMArgs, *others: P.args, **named: P.kwargs) -> T:
        while True:
            try:
                return build(args, *others, **named)
            except PluginError as error:
                if is_by_name(args.device) or not leave_out(error):
                    raise

    return started


def check_operations(compilation: CompilationConfig) -> None:
    """Raise `ValidationError` if `custom_ops` names an operation that neither this package nor a plugin has."""
    if any(name not in op_registry for name in compilation.mentioned):
        # The operation may be in a module that this model does not import.
        for module in pkgutil.walk_packages(llm.layers.__path__, "llm.layers."):
            importlib.import_module(module.name)
    check_registered(compilation)


def let_platform_update(platform: Platform, args: LLMArgs) -> LLMArgs:
    """The arguments after the platform's update; raises `PluginError` if it returns anything but arguments."""
    updated = update_config(platform, args)
    if not isinstance(updated, LLMArgs):
        raise PluginError(
            f"{type(platform).__name__}.check_and_update_config must return the LLMArgs to go on with "
            f"(dataclasses.replace makes them), got {updated!r}.",
            plugin=platform.plugin,
        )
    return updated


def check_quantization(config: QuantizationConfig, platform: Platform, dtype: torch.dtype) -> None:
    """Raise `ValidationError` if the platform does not support this quantization with activations of `dtype`."""
    name, takes = config.get_name(), config.get_supported_act_dtypes()
    platform.verify_quantization(name)
    capability = platform.get_device_capability()
    least = config.get_min_capability()
    if dtype not in takes:
        possible = [item for item in takes if item in supported_dtypes(platform)]
        problem = (
            f"takes activations of {' or '.join(map(_name, takes))}, and those on {platform.name} are {_name(dtype)}"
        )
        advice = f"pass dtype={_name(possible[0])!r}" if possible else "use another quantization"
    elif capability is not None and 10 * capability[0] + capability[1] < least:
        has = ".".join(map(str, capability))
        problem = f"needs a device of capability {least / 10}, and {platform.get_device_name()} has {has}"
        advice = "use another quantization"
    else:
        return
    raise ValidationError(f"quantization={name!r} {problem}; {advice}.", parameter="quantization", value=name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reasons_of_update(platform: Platform, asked: LLMArgs, updated: LLMArgs) -> dict[str, str]:
    """Argument -> why it has its value, for those that the platform changed."""
    changed = [item.name for item in fields(LLMArgs) if getattr(asked, item.name) != getattr(updated, item.name)]
    if "compilation_config" in changed:
        changed += ["custom_ops", "mode", "backend"]
    return {name: f"set by platform {platform.name}" for name in changed}


def kv_cache_specs(platform: Platform, declared: Sequence[StateSpec]) -> list[StateSpec]:
    """The layers' specs after the platform's update; raises `PluginError` unless it returns one spec per state."""
    updated = list(platform.update_kv_cache_specs(declared))
    if len(updated) != len(declared) or not all(isinstance(spec, StateSpec) for spec in updated):
        raise PluginError(
            f"{type(platform).__name__}.update_kv_cache_specs must return one StateSpec for each of "
            f"{len(declared)} states, got {updated!r}.",
            plugin=platform.plugin,
        )
    return updated
