"""Replacing operations and layers by class: the registries, and which class replaces which on a platform.

Owns `Replaceable`, the base of `CustomOp` and `PluggableLayer`. Does not own dispatch: `llm.base.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from llm.base.construction import construction
from llm.base.vllm_paths import NAMES
from llm.base.watch import Patchable
from llm.errors import ValidationError
from llm.plugins import platforms_owning, plugin_of

T = TypeVar("T", bound=type)

# Registered name -> in-tree class.
op_registry: dict[str, type[Replaceable]] = {}
# In-tree class name -> the class that replaces it, on every platform.
op_registry_oot: dict[str, type[Replaceable]] = {}
# Name of a plugin's platform -> the same, on that platform only.
platform_replacements: dict[str, dict[str, type[Replaceable]]] = {}


class Replaceable(Patchable):
    """Common base of `CustomOp` and `PluggableLayer`: a registered name, and a class that may replace this one.

    Both use the same two dictionaries, so `register_oot` of one also replaces classes of the other.
    """

    name: ClassVar[str] = ""
    vllm_name: ClassVar[str] = ""  # the class that vLLM registers under `name`, if its name differs
    op_registry: ClassVar[dict[str, type[Replaceable]]] = op_registry
    op_registry_oot: ClassVar[dict[str, type[Replaceable]]] = op_registry_oot
    _is_base: ClassVar[bool] = True  # set per class, not inherited: True for classes that are no operations themselves

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        replacement = _replacement(cls.__name__) or cls
        if issubclass(cls, replacement):
            return super().__new__(cls)
        if not issubclass(replacement, cls):
            raise _not_a_subclass(replacement, cls.__name__)
        return super().__new__(replacement)

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Class decorator: register the class as `name`, e.g. "rms_norm"; raises `ValidationError` if it is taken."""

        def decorate(op_cls: T) -> T:
            _check_class(op_cls, cls)
            if _is_taken(op_registry, name, op_cls):
                raise _duplicate(name, op_registry[name], "op_registry")
            op_cls.name = name  # type: ignore[attr-defined]
            op_registry[name] = op_cls
            return op_cls

        return decorate

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        """Class decorator: construct the class in place of the in-tree class that it derives from.

        All of these work: `@CustomOp.register_oot`, with `()`, with `("RMSNorm")` or `(name="RMSNorm")`, and
        `@RMSNorm.register_oot`. The name is that of the in-tree class here or in vLLM, or its registered name
        ("rms_norm").

        Raises:
            ValidationError: the class does not derive from the one it replaces, that one is replaced already, or no
                name is given and none can be derived from the class.
        """
        if isinstance(_decorated_op_cls, str):
            _decorated_op_cls, name = None, _decorated_op_cls

        def decorate(op_cls: T) -> T:
            _check_class(op_cls, Replaceable)
            replaced = _target(op_cls, cls, name)
            op_cls._check_replaces(replaced)  # type: ignore[attr-defined]
            target = replaced.__name__
            registries = {f"platform_replacements[{name!r}]": name for name in platforms_owning(op_cls)}
            for label, platform in registries.items() or [("op_registry_oot", None)]:
                registry = op_registry_oot if platform is None else platform_replacements.setdefault(platform, {})
                if _is_taken(registry, target, op_cls):
                    raise _duplicate(target, registry[target], label)
                registry[target] = op_cls
            return op_cls

        return decorate if _decorated_op_cls is None else decorate(_decorated_op_cls)

    @classmethod
    def _check_replaces(cls, replaced: type) -> None:
        """Raise `ValidationError` if nothing would call what this class has in the place of `replaced`."""


def replaced_class(cls: type) -> type | None:
    """The in-tree class that `cls` is registered to replace on any platform, None if it replaces none."""
    for registry in (op_registry_oot, *platform_replacements.values()):
        for key, replacement in registry.items():
            if replacement is cls:
                return _base_named(cls, key)
    return None


def replacement_reason(cls: type) -> str:
    """What replaced the in-tree class by `cls`: "replaced by plugin acme: AcmeRMSNorm"."""
    plugin = plugin_of(cls)
    who = f"replaced by plugin {plugin}" if plugin else f"replaced from {cls.__module__}"
    return f"{who}: {cls.__name__}"


def _replacement(name: str) -> type[Replaceable] | None:
    """The class that replaces `name` on the platform of the model under construction; two are an error."""
    platform = construction().platform
    anywhere = op_registry_oot.get(name)
    here = platform_replacements.get(platform.name, {}).get(name) if platform is not None else None
    if platform is None or here is None or anywhere is None:
        return here or anywhere
    raise ValidationError(
        f"{name} is replaced twice on {platform.name}: by {here.__module__}.{here.__qualname__} of the platform and by "
        f"{anywhere.__module__}.{anywhere.__qualname__}; op_registry_oot.pop({name!r}) removes the second.",
        parameter="register_oot",
        value=anywhere,
    )


def _target(op_cls: type, called_on: type, name: str | None) -> type:
    """The in-tree class that `op_cls` is to replace."""
    if name is not None:
        key = op_registry[name].__name__ if name in op_registry else name
        target = _base_named(op_cls, key)
        if target is not None:
            return target
        if key in NAMES:
            message = f"there is no {key} to replace; {NAMES[key]}."
            raise ValidationError(message, parameter="name", value=name)
        raise _not_a_subclass(op_cls, key)
    if not vars(called_on).get("_is_base", False):
        if op_cls is called_on or not issubclass(op_cls, called_on):
            raise _not_a_subclass(op_cls, called_on.__name__)
        return called_on
    base = op_cls.__mro__[1]
    if base not in op_registry.values():
        raise ValidationError(
            f"what {op_cls.__name__} replaces is not clear: its base {base.__name__} is not registered; say it with "
            "@CustomOp.register_oot(name='ItsClassName').",
            parameter="name",
            value=None,
        )
    return base


def _base_named(cls: type, key: str) -> type | None:
    """The base class of `cls` whose name, here or in vLLM, is `key`."""
    return next((base for base in cls.__mro__[1:] if key in (base.__name__, vars(base).get("vllm_name"))), None)


def _check_class(op_cls: Any, base: type) -> None:
    if not isinstance(op_cls, type) or not issubclass(op_cls, base):
        raise ValidationError(
            f"only classes derived from {base.__name__} can be registered, got {op_cls!r}.",
            parameter="op_cls",
            value=op_cls,
        )


def _is_taken(registry: dict[str, type[Replaceable]], name: str, op_cls: type) -> bool:
    """True if another class has the name; the same class, defined again by a notebook cell, does not count."""
    other = registry.get(name)
    if other is None or other is op_cls:
        return False
    is_rerun = op_cls.__module__ == "__main__" and other.__module__ == "__main__"
    return not (is_rerun and other.__qualname__ == op_cls.__qualname__)


def _duplicate(name: str, other: type, registry: str) -> ValidationError:
    return ValidationError(
        f"{name!r} is already registered: {other.__module__}.{other.__name__}; {registry}.pop({name!r}) removes it.",
        parameter="name",
        value=name,
    )


def _not_a_subclass(replacement: type, replaced: str) -> ValidationError:
    return ValidationError(
        f"{replacement.__name__} cannot replace {replaced}: it does not derive from it, so it would never be "
        f"initialised; write class {replacement.__name__}({replaced}).",
        parameter="register_oot",
        value=replacement,
    )
