"""Whether what computes a model is hooked or patched: a fused or recorded path would bypass it.

Patches of `Patchable` and `Counted` are counted, `patches_of` finds and names them, and `Watch` asks in every step. A
patch is a function set on a class after it was defined, on a module of the rooms that compute steps after it was
imported, or on an object in the place of one of its class; a class that was defined with it, as a replacement is, is
not patched.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_ABSENT = object()
# Objects that a module computes with, beside its own functions.
_PARTS = ("quant_method", "backend")
# Attributes of objects of which every assignment is counted.
_COUNTED = frozenset({"forward", "_forward_method", "_forward_hooks", "_forward_pre_hooks", *_PARTS})
# Packages whose decorators leave a function what it is.
_DECORATORS = frozenset({"torch", "functools", "contextlib", "typing", "abc"})
# Whose functions a step may look up by name, and the packages whose functions may be among them.
_ROOMS = ("llm.layers", "llm.models", "llm.quantization", "llm.kernels")
_THEIR_PACKAGES = {
    *("llm", "torch", "numpy", "transformers", "safetensors", "triton"),
    *(sys.stdlib_module_names - {"unittest"}),
}
_CALL = nn.Module.__call__
# torch counts a hook before it is in the module's dict, and another thread may ask in between.
_LOOKS = 2


class _Patches:
    """Of all classes, modules and objects of the process.

    Attributes:
        count: how many there were.
        of_classes, of_modules: by (class or module, name), what it had before.
    """

    count = 0
    of_classes: ClassVar[dict[tuple[type, str], object]] = {}
    of_modules: ClassVar[dict[tuple[ModuleType, str], object]] = {}


class CountsPatches(ABCMeta):
    """Of classes that remember which of their functions were set after they were defined.

    It derives from ABCMeta so that such classes may have abstract methods.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        _note(cls, name, value)
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        _note(cls, name, _ABSENT)
        super().__delattr__(name)


def _note(cls: type, name: str, value: object) -> None:
    before, known = vars(cls).get(name, _ABSENT), _Patches.of_classes
    if (name.startswith("__") and name != "__call__") or not (_is_function(before) or _is_function(value)):
        return
    _Patches.count += 1
    original = known.setdefault((cls, name), before)
    inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), _ABSENT)
    if value is original or (original is _ABSENT and value is inherited):
        del known[cls, name]


def _is_function(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod)


class _Room(ModuleType):
    """A module that remembers which of its functions were set after it was imported."""

    def __setattr__(self, name: str, value: object) -> None:
        _note_function(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _note_function(self, name, _ABSENT)
        super().__delattr__(name)


def _note_function(module: ModuleType, name: str, value: object) -> None:
    before, known = vars(module).get(name, _ABSENT), _Patches.of_modules
    # What was not there before nothing calls; and classes are looked up when a model is made.
    if name.startswith("__") or before is _ABSENT or not _is_plain(before):
        return
    _Patches.count += 1
    original = known.setdefault((module, name), before)
    if value is original or (original is _ABSENT and _is_theirs(value)):
        del known[module, name]


def _count_in_modules() -> None:
    """Note what sets functions of the rooms from now on, and those that are of other packages already."""
    rooms = [name for name in [*sys.modules] if name.startswith(_ROOMS)]
    for module in filter(None, map(sys.modules.get, rooms)):
        if type(module) is not ModuleType:
            continue
        module.__class__ = _Room
        for name, found in [*vars(module).items()]:
            if not name.startswith("__") and _is_plain(found) and not _is_theirs(found):
                _Patches.of_modules[module, name] = _ABSENT


def _is_plain(value: object) -> bool:
    """True of a function, or what is called as one."""
    return callable(value) and not isinstance(value, type)


def _is_theirs(function: object) -> bool:
    """True if its code, or that of its class, is of a package that the rooms import."""
    owner: str = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return owner.partition(".")[0] in _THEIR_PACKAGES


class Counted(metaclass=CountsPatches):
    """An object whose `Watch` need not look at it in every step: what patches it or its class is counted."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in _COUNTED or (callable(value) and (isinstance(value, nn.Module) or hasattr(type(self), name))):
            _Patches.count += 1


class Patchable(Counted, nn.Module):
    """A module whose `Watch` need not look at it in every step."""


def define(cls: type, name: str, function: object) -> None:
    """Set a function of a class as if it had been defined with it."""
    type.__setattr__(cls, name, function)


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """True if any module is hooked or patched."""
    found = tuple(modules)
    return any_is_hooked([vars(module) for module in found]) or next(patches_of(found), None) is not None


def any_is_hooked(found: Sequence[Mapping[str, object]]) -> bool:
    """True if a module with these `vars` has a hook: a step asks, and a module's own attribute lookup is slow."""
    if torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks:
        return True
    return any("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"] for own in found)


def patches_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, object]]:
    """("Class.name", what was set) of every patch of these modules, their methods of quantization and backends, and
    ("module.name", what was set) of functions in the rooms."""
    _count_in_modules()
    for module, name in list(_Patches.of_modules):
        yield f"{module.__name__.removeprefix('llm.')}.{name}", vars(module).get(name, _ABSENT)
    objects = list(_objects(modules))
    classes = {base for kind in {type(item) for item in objects} for base in kind.__mro__}
    for cls, name in list(_Patches.of_classes):
        if cls in classes:
            yield f"{cls.__name__}.{name}", vars(cls).get(name, _ABSENT)
    for cls in classes:
        others = [] if isinstance(cls, CountsPatches) else _functions(cls)
        yield from ((f"{cls.__name__}.{name}", found) for _, name, found in others if _is_foreign(found, cls))
    for item in objects:
        kind = type(item)
        for name, value in vars(item).items():
            if callable(value) and not name.startswith("__") and callable(getattr(kind, name, None)):
                yield f"{kind.__name__}.{name} of one object", value
        bound = vars(item).get("_dispatched", _ABSENT)
        if bound is not _ABSENT and vars(item)["_forward_method"] is not bound:
            yield f"{kind.__name__}._forward_method of one object", vars(item)["_forward_method"]


def _objects(modules: Iterable[nn.Module]) -> Iterator[object]:
    for module in modules:
        yield module
        yield from (part for name in _PARTS if isinstance(part := getattr(module, name, None), Counted))


def _functions(cls: type) -> list[tuple[Mapping[str, object], str, FunctionType]]:
    """(namespace, name, function) of a class's own functions; none of torch's and of builtin classes."""
    if cls.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
        return []
    own = vars(cls)
    named = ((name, value) for name, value in own.items() if not name.startswith("__") or name == "__call__")
    return [(own, name, value) for name, value in named if isinstance(value, FunctionType)]


def _is_foreign(function: Any, cls: type) -> bool:
    """True if a function of a class, or one that it wraps, is of another package than the class."""
    package = cls.__module__.partition(".")[0]
    while function is not None:
        owner = getattr(function, "__globals__", {}).get("__name__", package).partition(".")[0]
        if owner != package and owner not in _DECORATORS:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class Watch:
    """`is_watched` of the same modules again and again, in a time that does not grow with their number.

    torch gives every hook a number. While no new number was given and nothing `Counted` patched, those that were plain
    are plain still, and only the other modules and the functions of their classes are looked at: experts are thousands
    of modules. Modules that were exchanged for others since then count as patched.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        _count_in_modules()
        self._modules = tuple(modules)
        others = [module for module in self._modules if not isinstance(module, Patchable)]
        self._others = [vars(module) for module in others]
        classes = {base for kind in {type(module) for module in others} for base in kind.__mro__}
        self._functions = [found for cls in classes if not isinstance(cls, CountsPatches) for found in _functions(cls)]
        self._parts = [_parts_of(module) for module in self._modules]
        self._counted = (-1, -1)
        self._looks_left = 0

    def __call__(self) -> bool:
        counted = (RemovableHandle.next_id, _Patches.count)
        if counted != self._counted:
            self._counted, self._looks_left = counted, _LOOKS
        if not self._looks_left:
            return any_is_hooked(self._others) or self._is_changed()
        watched = is_watched(self._modules) or self._is_changed() or self._has_other_parts()
        # Taking a hook off is not counted: look until it is gone.
        self._looks_left = _LOOKS if watched else self._looks_left - 1
        return watched

    def _is_changed(self) -> bool:
        """True if a function of a class that counts no patches is another than it was."""
        if nn.Module.__call__ is not _CALL:
            return True
        return any(own.get(name) is not function for own, name, function in self._functions)

    def _has_other_parts(self) -> bool:
        """True if a module has other submodules, another method of quantization or another backend than it had."""
        return [_parts_of(module) for module in self._modules] != self._parts


def _parts_of(module: nn.Module) -> list[object]:
    own = vars(module)
    return [*own["_modules"].values(), *(own.get(name) for name in _PARTS)]
