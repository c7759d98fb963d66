"""Whether modules are hooked or patched: a fused or recorded path would bypass them.

Owns `is_watched`, which looks at every module, and `Watch`, which asks the same of many modules in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_WHERE_HOOKS_ARE = frozenset({"forward", "_forward_hooks", "_forward_pre_hooks"})
# torch counts a hook before it is in the module's dict, and another thread may ask in between.
_LOOKS = 2


class Patchable(nn.Module):
    """A module whose `Watch` need not look at it in every step: what patches it is counted.

    Attributes:
        patches: assignments to `forward`, or to a dict of hooks, of all such modules of the process.
    """

    patches: ClassVar[int] = 0

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)  # type: ignore[arg-type]
        if name in _WHERE_HOOKS_ARE:
            Patchable.patches += 1


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """True if any module is hooked or patched."""
    return any_is_watched([vars(module) for module in modules])


def any_is_watched(found: Sequence[Mapping[str, object]]) -> bool:
    """`is_watched` of the modules with these `vars`: a step asks, and a module's own attribute lookup is slow."""
    if torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks:
        return True
    return any("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"] for own in found)


class Watch:
    """`is_watched` of the same modules again and again, in a time that does not grow with their number.

    torch gives every hook a number. While no new number was given and no `Patchable` patched, those that were plain
    are plain still, and only the other modules are looked at: experts are thousands of modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._others = [vars(module) for module in self._modules if not isinstance(module, Patchable)]
        self._counted = (-1, -1)
        self._looks_left = 0

    def __call__(self) -> bool:
        counted = (RemovableHandle.next_id, Patchable.patches)
        if counted != self._counted:
            self._counted, self._looks_left = counted, _LOOKS
        if not self._looks_left:
            return any_is_watched(self._others)
        watched = is_watched(self._modules)
        # Taking a hook off is not counted: look until it is gone.
        self._looks_left = _LOOKS if watched else self._looks_left - 1
        return watched
