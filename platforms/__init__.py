"""The platform that this process computes on.

It is the platform named by `device=` or LLM_PLATFORM; else the one plugin whose device is present; else the first
built-in platform whose device is present and that can run models. A platform describes a device and holds no model
state. `current_platform` is the choice for "auto", made at the first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llm import plugins
from llm.base.vllm_paths import missing_name
from llm.config import env
from llm.errors import LLMError, PluginError, ValidationError, nearest
from llm.platforms.accelerators import CudaPlatform, MpsPlatform, RocmPlatform, TpuPlatform, XpuPlatform
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    current_platform: Platform

__all__ = ["Platform", "PlatformEnum", "current_platform", "select_platform"]

BUILTIN: tuple[type[Platform], ...] = (
    *(CudaPlatform, RocmPlatform, XpuPlatform, MpsPlatform, TpuPlatform),
    CpuPlatform,
)


if not TYPE_CHECKING:  # or mypy would take any name

    def __getattr__(name: str) -> object:
        if name == "current_platform":
            return select_platform()[0]
        raise missing_name(__name__, name)


def select_platform(device: str = "auto") -> tuple[Platform, str]:
    """The platform for `device`, always the same object, and why it was chosen.

    Args:
        device: "auto", a name, or a name and which of its devices, as "cuda:1".

    Raises:
        ValidationError: the name is unknown, or its device is absent or cannot compute.
        PluginError: two plugins found their device, or one is broken.
    """
    if device != "auto":
        return _by_name(device, "device"), "asked for"
    override = env.get("LLM_PLATFORM")
    if override is not None:
        return _by_name(override.strip().lower(), "LLM_PLATFORM"), f"LLM_PLATFORM={override}"
    return _plugged_in() or _built_in()


def is_by_name(device: str) -> bool:
    """True if `device` or LLM_PLATFORM names the platform, so that no other may be used instead."""
    return device != "auto" or env.get("LLM_PLATFORM") is not None


def _by_name(device: object, parameter: str) -> Platform:
    name, index = _name_and_index(device)
    if name == "cuda" and torch.version.hip is not None:
        name = "rocm"  # as PyTorch spells AMD's devices
    for cls in BUILTIN:
        if cls.name == name:
            is_there, seen = cls.detect()
            platform = _instance(cls, cls.name, index=index)
            problem = platform.why_not() if is_there else seen
            if problem is None:
                return platform
            raise ValidationError(
                f"{parameter}={device!r} cannot be used: {problem}; 'cpu' always can.",
                parameter=parameter,
                value=device,
            )
    found = {plugin.name: plugin for plugin in plugins.installed(plugins.PLATFORM_PLUGINS)}
    if name not in found:
        known = [*found, *(cls.name for cls in BUILTIN)]
        raise ValidationError(
            f"{parameter}={device!r} is not known.{nearest(str(name), known)} Known: auto, {', '.join(known)}.",
            parameter=parameter,
            value=device,
        )
    answers = plugins.ask_platform_plugins((found[name],))
    path = answers.get(found[name])
    if path is None and found[name] in answers:
        raise ValidationError(
            f"{parameter}={device!r} cannot be used: {found[name]} says that its device is not there.",
            parameter=parameter,
            value=device,
        )
    plugged_in = None if path is None else _from_plugin(found[name], path, index)
    if plugged_in is None:
        raise PluginError(f"{parameter}={device!r} cannot be used: {found[name]} is broken and was left out.")
    return plugged_in


def _name_and_index(device: object) -> tuple[object, int]:
    """("cuda", 1) of "cuda:1"."""
    name, colon, number = str(device).rpartition(":")
    return (name, int(number)) if colon and number.isdecimal() else (device, 0)


def _plugged_in() -> tuple[Platform, str] | None:
    """The platform of the one plugin whose device is present, None if there is none."""
    active = {plugin: path for plugin, path in plugins.ask_platform_plugins().items() if path is not None}
    if len(active) > 1:
        names = " and ".join(map(str, active))
        raise PluginError(
            f"only one platform plugin can be active, and {names} found their devices; choose with "
            f"LLM_PLATFORM={next(iter(active)).name}, or leave one out of LLM_PLUGINS."
        )
    made = {plugin: _from_plugin(plugin, path) for plugin, path in active.items()}
    return next(((platform, f"{plugin}") for plugin, platform in made.items() if platform is not None), None)


def _built_in() -> tuple[Platform, str]:
    """The first built-in platform that can compute here."""
    said: dict[str, str] = {}
    notes: list[str] = []
    for cls in BUILTIN:
        is_there, said[cls.name] = cls.detect()
        if not is_there:
            continue
        platform = _instance(cls, cls.name)
        problem = platform.why_not()
        if problem is None:
            return platform, "; ".join([*notes, _found(cls, said[cls.name], bool(notes))])
        notes.append(f"{cls.name} is there ({said[cls.name]}): {problem}")
        said[cls.name] = problem
    tried = "; ".join(f"{name}: {why}" for name, why in said.items())
    raise LLMError(f"there is no platform to compute on ({tried}; no platform plugin is active).")


def _found(cls: type[Platform], seen: str, is_second: bool) -> str:
    """Why a platform is used that nobody asked for."""
    if not issubclass(cls, CpuPlatform):
        return f"{seen} is there"
    return seen if is_second else "no other device is there"


def _from_plugin(plugin: plugins.Plugin, path: str, index: int = 0) -> Platform | None:
    """The platform at a plugin's class path; None if it is broken and LLM_PLUGIN_ERRORS=warn skips it."""

    def make() -> Platform:
        cls = plugins.load_class(path, Platform, str(plugin))
        # A class that says nothing, as those for vLLM, is of the first version.
        plugins.check_contract(getattr(cls, "contract_version", 1), str(plugin))
        return _instance(cls, plugin.name, plugin, index)

    found: Platform | None = plugins.guarded(plugin, "failed while it was made", make)
    return found


# (class, name, plugin, index) -> its one object in this process.
_instances: dict[tuple[type[Platform], str, plugins.Plugin | None, int], Platform] = {}


def _instance(cls: type[Platform], name: str, plugin: plugins.Plugin | None = None, index: int = 0) -> Platform:
    """One object per device and process. A plugin registers its classes when its platform is constructed."""
    key = cls, name, plugin, index
    if key in _instances:
        return _instances[key]
    platform = cls()
    platform.name, platform.index = name, index
    platform.pre_register_and_update()
    if plugin is not None:
        platform.plugin = plugin
        _attribute_hooks(platform, plugin)
    _instances[key] = platform
    return platform


def _attribute_hooks(platform: Platform, plugin: plugins.Plugin) -> None:
    """Wrap the platform's methods, so that an exception names the plugin."""
    for name in vars(Platform):
        # One written for vLLM may have a property in the place of a method.
        if not name.startswith("_") and callable(getattr(type(platform), name)):
            setattr(platform, name, plugins.hook(plugin, getattr(platform, name)))
