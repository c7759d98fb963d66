"""Plugins: installed packages that extend this one through entry points, and their contract.

Imports are lazy: a platform's entry point is a function that returns a class path, and only the class of the chosen
platform is imported.

The groups:
    llm.platform_plugins    a function without arguments that returns the class path of a `Platform`, or None where its
                            device is absent. At most one may be active. `LLM_PLATFORM` takes its name.
    llm.general_plugins     a function without arguments, called once per process before a config is read: registers
                            models, quantization methods, operations.
    llm.logits_processors   a class of `llm.v1.sample.logits_processor.LogitsProcessor`.

The contract of an out-of-tree accelerator, version 1. The host promises, until `CONTRACT_VERSION` changes:
    1. The platform: `llm.platforms.interface.Platform`, by class path. Its class states `contract_version = 1` or, as
       one written for vLLM, none; any other number is refused.
    2. Two config hooks: `Platform.pre_register_and_update`, before any file is read; `check_and_update_config`, which
       returns the `LLMArgs` to use, before they are resolved, or changes a `vllm_config` in place.
    3. The model runner: `Platform.get_model_runner_cls` names a subclass of `llm.runner.model_runner.ModelRunner`,
       whose methods `place_model`, `allocate_kv_caches`, `prepare_batch`, `extend_context`, `forward` and
       `compute_logits` can be overridden one by one. Matrices are made on `Platform.device`
       and filled while they are read; `place_model` moves what is not there.
    4. Kernels: `Platform.get_backend_cls` names an `llm.kernels.backend.Backend`, which computes any of its
       `OPERATIONS`; PyTorch computes the rest. `Platform.get_attn_backend_cls` names an
       `llm.layers.attention.AttentionBackend`; it owns the layout of the KV cache and the two operations on it.
    5. Operations and layers: `@CustomOp.register_oot` and `@PluggableLayer.register_oot` (`llm.layers.custom_op`),
       keyed by the in-tree class name. `forward_oot` is bound first; an inherited forward never overrides the
       replacement's. A class registered by a platform plugin's hook or package replaces on that platform alone; any
       other class, such as a general plugin's, on every platform.
    6. Quantization: `llm.quantization.registry.register_quantization_config` takes precedence over the built-in
       methods; `Platform.verify_quantization` and `supported_quantization` refuse methods that the device lacks.
    7. State: a layer declares an `llm.forward.StateSpec`, for attention a `KVCacheSpec`;
       `Platform.update_kv_cache_specs` may replace the specs by its own subclasses, whose `bytes_per_token` and
       `bytes_per_request` the memory plan uses.
    8. Models: `llm.models.registry.register_model`.
    9. Per step: entries that `ModelRunner.extend_context` adds to `ForwardBatch.extensions` reach the model, its layers
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
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from llm.base.locks import renewed_in_children
from llm.base.vllm_paths import missing_names
from llm.config import env
from llm.errors import LLMError, PluginError, ValidationError, nearest

CONTRACT_VERSION = 1

PLATFORM_PLUGINS = "llm.platform_plugins"
GENERAL_PLUGINS = "llm.general_plugins"
LOGITS_PROCESSORS = "llm.logits_processors"
GROUPS = (PLATFORM_PLUGINS, GENERAL_PLUGINS, LOGITS_PROCESSORS)
# vLLM's names.
PLATFORM_PLUGINS_GROUP, DEFAULT_PLUGINS_GROUP = PLATFORM_PLUGINS, GENERAL_PLUGINS
# vLLM's other groups -> why nothing is loaded from them.
_UNUSED_GROUPS = {
    "llm.io_processor_plugins": "there are no input and output plugins; convert data in your own code",
    "llm.stat_logger_plugins": "nothing is logged; read LLM.get_metrics()",
    "llm.endpoint_plugins": "the routes of the endpoint are fixed; serve an AsyncLLM by your own code",
}

_ADVICE = "repair or uninstall it, leave it out of LLM_PLUGINS, or set LLM_PLUGIN_ERRORS=warn"

logger = logging.getLogger("llm")
C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Plugin:
    """One entry point. `package`: its distribution, with the version; `module`: the top-level module."""

    group: str
    name: str
    package: str
    value: str

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].partition(".")[0]

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.package}"


# The loaded objects, in order; None for a plugin that failed under LLM_PLUGIN_ERRORS=warn.
_loaded: dict[Plugin, object] = {}
_called: set[Plugin] = set()
# Platform plugin -> (environment of the last call, its answer). The environment may enable or hide its device.
_answers: dict[Plugin, tuple[dict[str, str], str | None]] = {}
_lock = renewed_in_children(threading.RLock())
_acting: ContextVar[Plugin | None] = ContextVar("llm_acting_plugin", default=None)


def installed(group: str) -> tuple[Plugin, ...]:
    """The plugins of a group that may be loaded: those in `LLM_PLUGINS`; all, if it is unset.

    Raises `ValidationError` if `LLM_PLUGINS` names an unknown plugin.
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
    """Import the objects of the plugins' entry points, each once per process.

    Raises `PluginError` for the first that cannot be imported; with LLM_PLUGIN_ERRORS=warn it is left out.
    """
    with _lock:
        for plugin in (plugins := tuple(plugins)):
            if plugin not in _loaded:
                _loaded[plugin] = guarded(plugin, "cannot be imported", _import_entry, plugin)
        return {plugin: _loaded[plugin] for plugin in plugins if _loaded[plugin] is not None}


def load_general_plugins() -> None:
    """Call every general plugin once per process, and warn once of plugins that nothing uses. Raises as `load`."""
    with _lock:
        _warn_of_unused()
        for plugin, function in load(installed(GENERAL_PLUGINS)).items():
            if plugin not in _called:
                guarded(plugin, "failed", function)
                _called.add(plugin)


def load_plugins_by_group(group: str) -> dict[str, Any]:
    """Name -> object of the installed plugins of one of `GROUPS`, under vLLM's name. Raises as `load`."""
    if group not in GROUPS:
        problem = f"group={group!r} is none of {', '.join(GROUPS)}.{nearest(group, GROUPS)}"
        raise ValidationError(problem, parameter="group", value=group)
    return {plugin.name: found for plugin, found in load(installed(group)).items()}


def resolve_obj_by_qualname(qualname: str) -> Any:
    """The object at "package.module.Name", under vLLM's name; ImportError or AttributeError if there is none."""
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _warn_of_unused() -> None:
    allowed = env.get_list("LLM_PLUGINS")
    for plugin in _scan(tuple(sys.path)):
        if plugin.group in GROUPS or plugin in _called or (allowed is not None and plugin.name not in allowed):
            continue
        _called.add(plugin)
        why = _UNUSED_GROUPS.get(plugin.group) or f"groups are {', '.join(GROUPS)}.{nearest(plugin.group, GROUPS)}"
        logger.warning("%s is not used: its group is %s, and %s", plugin, plugin.group, why)


def ask_platform_plugins(plugins: Iterable[Plugin] | None = None) -> dict[Plugin, str | None]:
    """The class path that each platform plugin returns, None if its device is absent. Raises as `load`.

    A plugin's function is called once per process, and again if the environment has changed.

    Args:
        plugins: the plugins to ask; None: all that may be loaded.
    """
    environment = dict(os.environ)
    with _lock:
        found = load(installed(PLATFORM_PLUGINS) if plugins is None else plugins)
        for plugin, function in found.items():
            if plugin not in _answers or _answers[plugin][0] != environment:
                _answers[plugin] = environment, guarded(plugin, "failed", function)
        return {plugin: _answers[plugin][1] for plugin in found}


def plugin_of(cls: type) -> str | None:
    """The name of the loaded plugin whose package defines `cls`, None if there is none."""
    module = cls.__module__.partition(".")[0]
    return next(
        (plugin.name for plugin, value in _loaded.items() if value is not None and plugin.module == module), None
    )


def platforms_owning(cls: type) -> tuple[str, ...]:
    """The names of the platforms that a replacement registered now applies to; (): every platform.

    That is the platform of the plugin whose hook is running; else of the plugin whose package defines the class.
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


def check_contract(version: object, who: str) -> None:
    """Raise `PluginError` unless `version`, which a plugin was written for, is the one of this release."""
    if version != CONTRACT_VERSION:
        said = "says no contract_version" if version is None else f"was written for version {version!r}"
        raise PluginError(
            f"{who} {said} of the plugin contract, and this release has version {CONTRACT_VERSION}; "
            "see llm.plugins, and install versions that belong together."
        )


def load_class(path: str, base: C, who: str, plugin: Plugin | None = None) -> C:
    """The class at "package.module.Class" or "package.module:Class".

    Args:
        who: the origin of the path, for messages.
        plugin: the plugin of the `PluginError`.

    Raises:
        PluginError: the class cannot be imported or does not derive from `base`.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".") if isinstance(path, str) else ("", "", "")
    if not module or not name:
        message = f"{who} must answer with a class path such as 'acme.runner.AcmeRunner', got {path!r}."
        raise PluginError(message, plugin=plugin)
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        message = f"{who} names {path!r}, which cannot be imported: {_summary(error)}."
        raise PluginError(message, plugin=plugin) from error
    if not isinstance(found, type) or not issubclass(found, base):
        message = f"{who} names {path!r}, which does not derive from {base.__module__}.{base.__name__}."
        raise PluginError(message, plugin=plugin)
    return cast(C, found)


@functools.lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """The entry points of all groups "llm.*" on `path`, sorted. Cached: reading all metadata takes ten milliseconds."""
    groups = entry_points()
    names = [name for name in groups.groups if name.startswith("llm.")]
    found = {_plugin(entry) for name in names for entry in groups.select(group=name)}
    order = {group: place for place, group in enumerate(GROUPS)}
    return tuple(
        sorted(found, key=lambda item: (order.get(item.group, len(order)), item.group, item.name, item.package))
    )


def _plugin(entry: EntryPoint) -> Plugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    return Plugin(entry.group, entry.name, package, entry.value)


def _import_entry(plugin: Plugin) -> object:
    return EntryPoint(plugin.name, plugin.value, plugin.group).load()


def guarded(plugin: Plugin, what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call a plugin's function. An exception becomes a `PluginError`, or a warning and None: LLM_PLUGIN_ERRORS."""
    try:
        with _on_behalf_of(plugin):
            return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        message = str(error).rstrip(".") if isinstance(error, PluginError) else f"{plugin} {what}: {_summary(error)}"
        if _only_warns():
            logger.warning("%s; it is left out.", message)
            return None
        raise PluginError(f"{message}; {_ADVICE}.") from error


def hook(plugin: Plugin, function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method of a plugin's platform: an exception becomes a `PluginError` of the plugin.

    Errors of `llm.errors` pass: a platform raises them to refuse a request.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
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
    """True if LLM_PLUGIN_ERRORS=warn allows to go on without the failed platform plugin; logs a warning then."""
    if error.plugin is None or not _only_warns():
        return False
    logger.warning("%s; it is left out.", str(error).removesuffix(".").removesuffix(f"; {_ADVICE}"))
    with _lock:
        _loaded[error.plugin] = None
    return True


def _only_warns() -> bool:
    return env.get_choice("LLM_PLUGIN_ERRORS", env.PLUGIN_ERRORS, "RAISE") == "WARN"


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
