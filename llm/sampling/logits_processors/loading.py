"""Loading logits processor classes: given as classes, as `"module:Class"`, or installed as entry points."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from llm import plugins
from llm.base.checks import refuse
from llm.errors import ValidationError
from llm.sampling.logits_processors.interface import LogitsProcessor


class LogitsProcessorLoadError(ValidationError, RuntimeError):
    """The module of a logits processor cannot be imported; `__cause__` is the error it raised."""


def load_logits_processors(given: object) -> list[type[LogitsProcessor]]:
    """The installed classes, then those of `LLM(logits_processors=...)`.

    Args:
        given: a list of classes and of `"module:Class"` strings (nested classes by dots), or None.

    Raises:
        ValidationError: an item is neither, or is no subclass of `LogitsProcessor`.
        LogitsProcessorLoadError: a module cannot be imported. Also a RuntimeError.
        PluginError: an entry point cannot be imported, or is no subclass of it. Also a RuntimeError.
    """
    if given is None:
        given = []
    if isinstance(given, str | type) or not isinstance(given, Sequence):
        refuse("logits_processors", given, "a list of classes or 'module:Class' strings")
    return [*_installed(), *(load_logits_processor(item) for item in given)]


def load_logits_processor(item: object) -> type[LogitsProcessor]:
    """One class, given as a class or as `"module:Class"`; raises the same errors as `load_logits_processors`."""
    if isinstance(item, str):
        return _by_name(item)
    if not isinstance(item, type):
        refuse("logits_processors", item, "a class or a 'module:Class' string")
    if not issubclass(item, LogitsProcessor):
        raise ValidationError(
            f"{item.__name__} is not a subclass of LogitsProcessor (of llm.v1.sample.logits_processor).",
            parameter="logits_processors",
            value=item,
        )
    return item


def qualified_name(kind: type) -> str:
    """`module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _installed() -> list[type[LogitsProcessor]]:
    found = plugins.load(plugins.installed(plugins.LOGITS_PROCESSORS)).items()
    kinds = (plugins.guarded(plugin, "cannot be used", load_logits_processor, item) for plugin, item in found)
    return [kind for kind in kinds if kind is not None]


def _by_name(name: str) -> type[LogitsProcessor]:
    module_name, separator, path = name.partition(":")
    if not (module_name and separator and path) or ":" in path:
        refuse("logits_processors", name, "'module:Class' strings")
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _unloadable(f"the logits processor {name!r}", error) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            refuse("logits_processors", name, f"names of existing classes ({module_name} has no {path})")
        found = getattr(found, attribute)
    if not isinstance(found, type):
        refuse("logits_processors", name, f"names of classes ({path} is {type(found).__name__})")
    return load_logits_processor(found)


def _unloadable(what: str, error: BaseException) -> LogitsProcessorLoadError:
    message = f"{what} cannot be imported ({type(error).__name__}: {error})."
    return LogitsProcessorLoadError(message, parameter="logits_processors", value=what)
