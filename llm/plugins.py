"""Plugins: installed packages that extend this one through entry points, and the contract they are written against.

Owns discovery, the allow-list, loading each plugin once, and `CONTRACT_VERSION`. Nothing is imported before it is asked
for: a platform is found by a function that answers with a class path, and only the chosen platform's class is imported.

The groups:
    llm.platform_plugins    a function without arguments that returns the class path of a `Platform`, or None where its
                            device is absent. At most one may be active. Its name is what `LLM_PLATFORM` takes.
    llm.general_plugins     a function without arguments, called once per process before a config is read: registers
                            models, quantization methods, operations.
    llm.logits_processors   a class of `llm.v1.sample.logits_processor.LogitsProcessor`.

The contract of an out-of-tree accelerator, version 1. The host promises, until `CONTRACT_VERSION` changes:
    1. The platform: `llm.platforms.interface.Platform`, by class path. Its class says `contract_version = 1`; any other
       number is refused, and so is a class that says none.
    2. Two config hooks: `Platform.pre_register_and_update` before anything is read; `check_and_update_config`, which
       returns the `EngineArgs` to go on with, before they are resolved.
    3. The model runner: `Platform.get_model_runner_cls` names a subclass of `llm.engine.model_runner.ModelRunner`,
       whose methods `place_model`, `allocate_kv_caches`, `prepare_batch`, `extend_context`, `forward` and
       `compute_logits` are made to be overridden one by one. A model is built and loaded in the CPU's memory.
    4. Attention: `Platform.get_attn_backend_cls` names an `llm.layers.attention.AttentionBackend`; it owns the layout
       of the cache and the two operations on it.
    5. Operations and layers: `@CustomOp.register_oot` and `@PluggableLayer.register_oot` (`llm.layers.custom_op`),
       keyed by the in-tree class name. `forward_oot` is bound first; inherited code never hides the replacement's.
       What a platform plugin's hook or a module of its package registers applies on that platform alone; what anybody
       else registers, a general plugin for one, on every platform.
    6. Quantization: `llm.quantization.registry.register_quantization_config` comes before the built-in methods;
       `Platform.verify_quantization` and `supported_quantization` refuse what the device cannot compute.
    7. State: a layer declares an `llm.forward.StateSpec`, for attention a `KVCacheSpec`;
       `Platform.update_kv_cache_specs` may replace the specs by its own subclasses, whose `bytes_per_token` and
       `bytes_per_request` the memory plan asks.
    8. Models: `llm.models.registry.register_model`.
    9. Per step: whatever `ModelRunner.extend_context` puts into `ForwardBatch.extensions` reaches the model, its layers
       and the attention backend.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llm.base.errors import LLMError, PluginError, ValidationError, nearest
from llm.base.missing import missing_names
from llm.config import env

CONTRACT_VERSION = 1

PLATFORM_PLUGINS = "llm.platform_plugins"
GENERAL_PLUGINS = "llm.general_plugins"
LOGITS_PROCESSORS = "llm.logits_processors"
GROUPS = (PLATFORM_PLUGINS, GENERAL_PLUGINS, LOGITS_PROCESSORS)

_ADVICE = "repair or uninstall it, leave it out of LLM_PLUGINS, or set LLM_PLUGIN_ERRORS=warn"

logger = logging.getLogger("llm")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Plugin:
    """One entry point. `package` is the distribution that brings it, with its version; `module` the top-level name."""

    group: str
    name: str
    package: str
    value: str

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.package}"


# What was loaded, in order; a plugin that failed under LLM_PLUGIN_ERRORS=warn is there with None.
_loaded: dict[Plugin, Any] = {}
_called: set[Plugin] = set()
# Platform plugin -> the environment it was last asked in, which may switch its device on or off, and its answer.
_answers: dict[Plugin, tuple[dict[str, str], str | None]] = {}
_lock = threading.RLock()
_acting: ContextVar[Plugin | None] = ContextVar("llm_acting_plugin", default=None)


def installed(group: str) -> tuple[Plugin, ...]:
    """The plugins of a group that may be loaded: those in `LLM_PLUGINS`, all when it is unset.

    Raises `ValidationError` when `LLM_PLUGINS` names one that no group has.
    """
    allowed = env.get_list("LLM_PLUGINS")
    everything = _scan(tuple(sys.path))
    if allowed is None:
        return tuple(plugin for plugin in everything if plugin.group == group)
    known = {plugin.name for plugin in everything}
    for name in allowed:
        if name not in known:
            raise ValidationError(
                f"LLM_PLUGINS names {name!r}, which no installed package provides.{nearest(name, known)} "
                f"Known: {', '.join(sorted(known)) or 'no plugin is installed'}.",
                parameter="LLM_PLUGINS",
                value=name,
            )
    return tuple(plugin for plugin in everything if plugin.group == group and plugin.name in allowed)


def load(plugins: Iterable[Plugin]) -> dict[Plugin, Any]:
    """Import what the plugins point at, each once per process.

    Raises `PluginError` naming the first that cannot be imported; under LLM_PLUGIN_ERRORS=warn it is left out.
    """
    with _lock:
        for plugin in (plugins := tuple(plugins)):
            if plugin not in _loaded:
                _loaded[plugin] = guarded(plugin, "cannot be imported", _import_entry, plugin)
        return {plugin: _loaded[plugin] for plugin in plugins if _loaded[plugin] is not None}


def load_general_plugins() -> None:
    """Call every general plugin that was not called before in this process. Raises as `load`."""
    with _lock:
        for plugin, function in load(installed(GENERAL_PLUGINS)).items():
            if plugin not in _called:
                guarded(plugin, "failed", function)
                _called.add(plugin)


def ask_platform_plugins(plugins: Iterable[Plugin] | None = None) -> dict[Plugin, str | None]:
    """The class path that each platform plugin answers with, None where its device is absent. Raises as `load`.

    A plugin is asked once per process, and again when the environment has changed.

    `plugins`: those to ask; None: every one that may be loaded.
    """
    environment = dict(os.environ)
    with _lock:
        found = load(installed(PLATFORM_PLUGINS) if plugins is None else plugins)
        for plugin, function in found.items():
            if plugin not in _answers or _answers[plugin][0] != environment:
                _answers[plugin] = environment, guarded(plugin, "failed", function)
        return {plugin: _answers[plugin][1] for plugin in found}


def plugin_of(cls: type) -> str | None:
    """The name of the loaded plugin whose package defines `cls`, None when no plugin's does."""
    module = cls.__module__.partition(".")[0]
    return next(
        (plugin.name for plugin, value in _loaded.items() if value is not None and plugin.module == module), None
    )


def platforms_owning(cls: type) -> tuple[str, ...]:
    """The platforms that a replacement registered now is meant for, by name; none: for every platform.

    The plugin whose hook is running says it; when none is, the package that defines the class.
    """
    acting = _acting.get()
    if acting is not None and acting.group == GENERAL_PLUGINS:
        return ()
    module = cls.__module__.partition(".")[0]
    of_package = tuple(
        plugin.name for plugin in _scan(tuple(sys.path)) if plugin.group == PLATFORM_PLUGINS and plugin.module == module
    )
    if of_package or acting is None or acting.group != PLATFORM_PLUGINS:
        return of_package
    return (acting.name,)


def check_contract(version: Any, who: str) -> None:
    """Raise `PluginError` unless `version`, which a plugin was written against, is the one of this release."""
    if version != CONTRACT_VERSION:
        said = "says no contract_version" if version is None else f"was written for version {version!r}"
        raise PluginError(
            f"{who} {said} of the plugin contract, and this release has version {CONTRACT_VERSION}; "
            "see llm.plugins, and install versions that belong together."
        )


def load_class(path: str, base: C, who: str, plugin: Plugin | None = None) -> C:
    """The class at "package.module.Class" or "package.module:Class"; `who` names it, as messages say.

    Raises `PluginError`, of `plugin`, when it cannot be imported or does not derive from `base`.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".") if isinstance(path, str) else ("", "", "")
    if not module or not name:
        message = f"{who} must answer with a class path such as 'acme.runner.AcmeRunner', got {path!r}."
        raise PluginError(message, plugin=plugin)
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        message = f"{who} names {path!r}, which cannot be imported: {_summary(error)}."
        raise PluginError(message, plugin=plugin) from error
    if not isinstance(found, type) or not issubclass(found, base):
        message = f"{who} names {path!r}, which does not derive from {base.__module__}.{base.__name__}."
        raise PluginError(message, plugin=plugin)
    return cast(C, found)


@functools.lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Every entry point of ours on `path`, sorted; reading all packages' metadata takes some ten milliseconds."""
    found = {_plugin(entry) for group in GROUPS for entry in entry_points(group=group)}
    return tuple(sorted(found, key=lambda plugin: (GROUPS.index(plugin.group), plugin.name, plugin.package)))


def _plugin(entry: EntryPoint) -> Plugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    return Plugin(entry.group, entry.name, package, entry.value)


def _import_entry(plugin: Plugin) -> Any:
    return EntryPoint(plugin.name, plugin.value, plugin.group).load()


def guarded(plugin: Plugin, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call into a plugin: what goes wrong there is told with its name and package, see LLM_PLUGIN_ERRORS."""
    try:
        with _on_behalf_of(plugin):
            return function(*args)
    except (Exception, SystemExit) as error:
        message = str(error).rstrip(".") if isinstance(error, PluginError) else f"{plugin} {what}: {_summary(error)}"
        if _only_warns():
            logger.warning("%s; it is left out.", message)
            return None
        raise PluginError(f"{message}; {_ADVICE}.") from error


def hook(plugin: Plugin, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a plugin's platform, as the engine calls it: an exception becomes a `PluginError` of the plugin.

    Errors of `llm.base.errors` pass: by them a platform says that it does not compute what was asked for.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            with _on_behalf_of(plugin):
                return function(*args, **kwargs)
        except LLMError:
            raise
        except (Exception, SystemExit) as error:
            message = f"{plugin}: {function.__name__} failed: {_summary(error)}; {_ADVICE}."
            raise PluginError(message, plugin=plugin) from error

    return called


def leave_out(error: PluginError) -> bool:
    """Whether to go on without the platform plugin that failed, as LLM_PLUGIN_ERRORS=warn says; warns then."""
    if error.plugin is None or not _only_warns():
        return False
    logger.warning("%s; it is left out.", str(error).removesuffix(".").removesuffix(f"; {_ADVICE}"))
    with _lock:
        _loaded[error.plugin] = None
    return True


def _only_warns() -> bool:
    return env.get_choice("LLM_PLUGIN_ERRORS", ("RAISE", "WARN"), "RAISE") == "WARN"


@contextmanager
def _on_behalf_of(plugin: Plugin) -> Iterator[None]:
    token = _acting.set(plugin)
    try:
        yield
    finally:
        _acting.reset(token)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")


if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
