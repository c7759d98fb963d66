"""Operations and layers that can be replaced by plugins, and operations that can be turned on and off.

Replacement is by class (`Replaceable`, the base of `CustomOp` and `PluggableLayer`): `op_registry_oot`, for every
platform or for that of a plugin. An operation's forward is bound once, when it is constructed, to the platform's kernel
or to `forward_native`, and the reason is recorded. `forward_native` is plain PyTorch and the definition that every
other `forward_*` is tested against.

What decides, in order: a replacement registered for the class; `compilation_config.custom_ops`; the platform; the
operation itself, which may decline its kernel (`CustomOp.declines`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from llm.base.construction import construction
from llm.base.vllm_paths import NAMES
from llm.base.watch import CountsPatches, Patchable, define
from llm.config.compilation import CompilationConfig
from llm.errors import ValidationError, nearest
from llm.platforms.interface import Platform
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


# The platform's dispatch key -> candidate methods; the first that the operation has is bound.
_METHODS = {
    "cpu": ("forward_cpu",),
    "cuda": ("forward_cuda",),
    "hip": ("forward_hip", "forward_cuda"),
    "xpu": ("forward_xpu",),
    "tpu": ("forward_tpu",),
    "oot": ("forward_oot",),
    "native": (),
}


class PluggableLayer(Replaceable):
    """Base of layers that a plugin may replace by class. There is no dispatch: the replacement's `forward` runs.

    A replacement that has a `forward_oot` and no `forward` of its own, as when these layers were CustomOps, is called
    by its `forward_oot`, on every platform.
    """

    _is_base = True
    # What is called in the place of `forward`, for layers whose `forward` nothing calls.
    called_by: ClassVar[str] = "forward"

    @classmethod
    def _check_replaces(cls, replaced: type) -> None:
        inherited = [name for name in dir(cls) if name == "forward" or name.startswith("forward_")]
        own = [name for name in inherited if getattr(cls, name) is not getattr(replaced, name, None)]
        if cls.called_by != "forward" and own and getattr(cls, cls.called_by) is getattr(replaced, cls.called_by):
            problem = f"nothing calls the forward of {replaced.__name__}; override {cls.called_by}"
        elif "forward" in own or not own:
            return
        elif "forward_oot" in own:
            define(cls, "forward", cls.forward_oot)  # type: ignore[attr-defined]
            return
        else:
            problem = f"{replaced.__name__} is a PluggableLayer, which has no dispatch; name it forward or forward_oot"
        raise ValidationError(
            f"{cls.__name__} has a {own[0]} that would never run: {problem}.", parameter="register_oot", value=cls
        )


@dataclass(frozen=True)
class Binding:
    """Which method an operation runs (`forward_cpu` ...) and why; whether it is off, and whether it is compiled."""

    method: str
    reason: str
    is_off: bool = False
    compiled: bool = False


class _BoundOnceMade(CountsPatches):
    """Binds an operation after its constructor has returned, because `declines` may read what the constructor set."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        op = super().__call__(*args, **kwargs)
        op._bind()
        return op


class CustomOp(Replaceable, metaclass=_BoundOnceMade):
    """Base of operations with more than one implementation.

    An operation overrides `forward_native` and, of `forward_cpu`, `forward_cuda`, `forward_hip` (default:
    `forward_cuda`), `forward_xpu`, `forward_tpu` and `forward_oot`, those for which it has kernels. A kernel inherited
    from a class is not bound if a subclass has overridden `forward_native`: it would compute something else.

    Args:
        enforce_enable: on, whatever `custom_ops` says.
        compile_native: False: `forward_native` is not compiled when the operation is off, whatever the mode.

    Attributes:
        binding: what was bound and why; `llm.explain()` shows it.
        is_layer: it computes by calling other operations, with one `forward_native` for every platform: turned off, it
            computes the same, and nothing is compiled. What it calls has switches of its own.
    """

    _is_base = True
    is_layer: ClassVar[bool] = False
    binding: Binding

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = True) -> None:
        super().__init__()
        self._enforce_enable = enforce_enable
        self._compile_native = compile_native

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The definition, in plain PyTorch."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Of the base never bound: `forward_native` is. These are here for `super()` and for calls by hand."""
        return self.forward_native(*args, **kwargs)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_cuda(*args, **kwargs)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def declines(self, method: str) -> str | None:
        """Why this instance cannot run `method` ("forward_cpu" ...), None if it can; called once, after construction.

        Override it for a kernel that may be missing or does not support a dtype or head size: `forward_native` is bound
        instead.
        """
        return None

    @classmethod
    def enabled(cls) -> bool:
        """True if the config of the model under construction turns this operation on."""
        return construction().compilation.judge(cls.name)[0]

    @staticmethod
    def default_on() -> bool:
        """True if operations that `custom_ops` does not name are on."""
        return construction().compilation.base_mode == "all"

    def dispatch_forward(self, compile_native: bool = True) -> Callable[..., Any]:
        """What `forward` calls; called once, after construction. A subclass may choose another method of its own.

        Args:
            compile_native: `forward_native` may be compiled when the operation is off.
        """
        self.binding, method = self._dispatch(compile_native)
        return method

    def _bind(self) -> None:
        # Twice, so that a method that is set later is seen (`llm.base.watch`).
        self._forward_method = self._dispatched = self.dispatch_forward(self._compile_native)
        chooser = _definer(type(self), "dispatch_forward")
        if chooser is not None:
            method = getattr(self._forward_method, "__name__", repr(self._forward_method))
            self.binding = Binding(method, f"chosen by {chooser.__name__}.dispatch_forward")

    def _dispatch(self, compile_native: bool) -> tuple[Binding, Callable[..., Any]]:
        """What to run and why: decided by the class, `custom_ops`, the platform and `declines`, in that order."""
        config = construction().compilation
        replaced = replaced_class(type(self))
        prefix = f"{replacement_reason(type(self))}; " if replaced else ""
        if replaced is not None and type(self).forward is not replaced.forward:  # type: ignore[attr-defined]
            # Called as it stands; what is bound is there for `super().forward`.
            binding = Binding("forward", f"{prefix}a forward of its own, which custom_ops does not turn off")
            return binding, self._bound(self._choose_kernel(None).method)
        own = None if replaced is None else self._own_methods(replaced)
        is_on, item = config.judge(self.name)
        if not is_on and not self._enforce_enable:
            compiled = compile_native and config.compiles and not self.is_layer
            return self._native(f"{prefix}disabled by {item}", compiled=compiled)
        if self._enforce_enable and not is_on:
            prefix += "enforced; "
        binding = self._choose_kernel(own)
        return Binding(binding.method, prefix + binding.reason), self._bound(binding.method)

    def _bound(self, method: str) -> Callable[..., Any]:
        """The function that `forward` calls for `method`."""
        return getattr(self, method)

    def _choose_kernel(self, own: tuple[str, ...] | None) -> Binding:
        """The platform's kernel if there is one. `own`: the methods of a replacement, one of which must be bound."""
        wanted = _wanted_methods(construction().platform)
        if own is not None:
            wanted = tuple(dict.fromkeys(("forward_oot", *wanted)))
            method = next(method for method in (*wanted, "forward_native") if method in own)
            declined = None if method == "forward_native" else self.declines(method)
            return Binding("forward_native", f"{declined}, native") if declined else _kernel(method)
        if self.is_layer:
            return Binding("forward_native", "a layer of other operations")
        reasons: list[str] = []
        for method in wanted:
            missing = self._missing(method) or self.declines(method)
            if missing is None:
                return Binding(method, ", ".join([*reasons, _kernel(method).reason]))
            reasons.append(missing)
        if construction().platform is None:
            reasons = ["made outside of an LLM"]
        return Binding("forward_native", ", ".join([*reasons, "native"]))

    def _missing(self, method: str) -> str | None:
        """Why this class cannot run `method`, None if it can."""
        definer, native = (_definer(type(self), name) for name in (method, "forward_native"))
        if definer is None:
            return f"no {method}"
        if native is not None and issubclass(native, definer) and native is not definer:
            return f"{method} is {definer.__name__}'s and {native.__name__} has a forward_native of its own"
        return None

    def _own_methods(self, replaced: type) -> tuple[str, ...]:
        """The methods that a replacement overrides and this platform may bind; raises if there are none."""
        wanted = ("forward_oot", *_wanted_methods(construction().platform), "forward_native")
        cls = type(self)
        own = tuple(name for name in wanted if getattr(cls, name, None) is not getattr(replaced, name, None))
        if not own:
            raise ValidationError(
                f"{cls.__name__} replaces {replaced.__name__} and overrides none of {', '.join(dict.fromkeys(wanted))}"
                ": what it inherits would run in its place; give it a forward_oot.",
                parameter="register_oot",
                value=cls,
            )
        return own

    def _native(self, reason: str, *, compiled: bool) -> tuple[Binding, Callable[..., Any]]:
        if not compiled:
            return Binding("forward_native", reason, is_off=True), self._bound("forward_native")
        backend = construction().compilation.backend
        method = torch.compile(self.forward_native, dynamic=True, backend=backend)
        return Binding("forward_native", f"{reason}, compiled by {backend}", is_off=True, compiled=True), method


def check_registered(compilation: CompilationConfig) -> None:
    """Raise `ValidationError`, with a similar name, if `custom_ops` names something that is no operation."""
    for name in compilation.mentioned:
        found = op_registry.get(name)
        if found is None:
            classes = {cls.__name__: op for op, cls in op_registry.items()}
            hint = f" Did you mean {classes[name]!r}?" if name in classes else nearest(name, op_registry)
            problem = f"no operation is registered as {name!r}.{hint}"
        elif not issubclass(found, CustomOp) and f"+{name}" in compilation.custom_ops:
            continue  # it is on, always
        elif not issubclass(found, CustomOp):
            problem = f"{name!r} is a PluggableLayer: it has no kernels to turn on or off."
        else:
            continue
        raise ValidationError(f"compilation_config: custom_ops: {problem}", parameter="custom_ops", value=name)


def _wanted_methods(platform: Platform | None) -> tuple[str, ...]:
    key = "native" if platform is None else platform.dispatch_key
    if key not in _METHODS:
        raise ValidationError(
            f"platform {type(platform).__name__} has dispatch_key {key!r}; use one of {', '.join(_METHODS)}.",
            parameter="dispatch_key",
            value=key,
        )
    return _METHODS[key]


def _kernel(method: str) -> Binding:
    return Binding(method, "native" if method == "forward_native" else f"{method.removeprefix('forward_')} kernel")


def _definer(cls: type, method: str) -> type | None:
    """The class below `CustomOp` that defines `method` for `cls`, None if there is none."""
    return next((base for base in cls.__mro__ if method in vars(base) and base is not CustomOp), None)
