"""Hooks and patches are seen at once, on modules that are looked at in each step and on those that are not."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from llm.base import watch
from llm.base.watch import Patchable, Watch, patches_of


class Counted(Patchable):
    def forward(self, x: Any) -> Any:
        return x


def hooked(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_hook(lambda *_: None).remove


def hooked_before(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_pre_hook(lambda *_: None).remove


def patched(module: Any) -> Callable[[], None]:
    module.forward = lambda x: x
    return lambda: delattr(module, "forward")


def given_hooks(module: Any) -> Callable[[], None]:
    module._forward_hooks = OrderedDict({0: print})
    return module._forward_hooks.clear


def globally(module: nn.Module) -> Callable[[], None]:
    return register_module_forward_hook(lambda *_: None).remove


def settled(modules: list[nn.Module]) -> Watch:
    """That has stopped to look at modules that count their patches."""
    is_watched = Watch(modules)
    assert not any(is_watched() for _ in range(4))
    return is_watched


@pytest.mark.parametrize("kind", [Counted, nn.Identity])
@pytest.mark.parametrize("put", [hooked, hooked_before, patched, given_hooks, globally])
def test_a_hook_is_seen_at_once_and_until_it_is_gone(put: Any, kind: type[nn.Module]) -> None:
    modules: list[nn.Module] = [kind() for _ in range(9)]
    is_watched = settled(modules)
    for _ in range(2):
        remove = put(modules[4])
        assert all(is_watched() for _ in range(5))
        remove()
        assert not any(is_watched() for _ in range(5))


def test_a_hook_that_was_counted_before_it_was_there_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may ask between the two steps of torch's `register_forward_hook`."""
    module = Counted()
    is_watched = settled([module])
    asked: list[bool] = []

    class Slow(OrderedDict[int, Any]):
        def __setitem__(self, key: int, hook: Any) -> None:
            asked.append(is_watched())
            super().__setitem__(key, hook)

    vars(module)["_forward_hooks"] = Slow()
    module.register_forward_hook(lambda *_: None)
    assert asked == [False] and is_watched()


def test_modules_that_count_their_patches_are_not_looked_at_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, other, looked_at = Counted(), nn.Identity(), []
    is_watched = settled([counted, other])
    monkeypatch.setattr(watch, "any_is_hooked", lambda found: looked_at.extend(found))
    is_watched()
    assert [id(found) for found in looked_at] == [id(vars(other))]


def wrapped(function: Any) -> Any:
    return functools.wraps(function)(lambda *args: function(*args))


def test_a_patch_of_a_class_is_named_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child(Counted):
        """Inherits what is patched."""

    module = Child()
    for cls, name in ((Counted, "forward"), (Child, "forward"), (Child, "made_up")):
        monkeypatch.setattr(cls, name, patch := wrapped(print), raising=False)
        assert list(patches_of([module])) == [(f"{cls.__name__}.{name}", patch)]
        assert not list(patches_of([nn.Identity()]))
        monkeypatch.undo()
        assert not list(patches_of([module]))
    Child.forward = Counted.forward  # type: ignore[method-assign]
    Child.constant = 3  # type: ignore[attr-defined]
    assert not list(patches_of([module]))


def test_a_function_from_elsewhere_is_found_in_a_class_that_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a class of transformers was patched before the model was loaded."""
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=8))
    assert not list(patches_of(mlp.modules()))
    monkeypatch.setattr(LlamaMLP, "forward", wrapped(LlamaMLP.forward))
    assert [name for name, _ in patches_of(mlp.modules())] == ["LlamaMLP.forward"]


def test_a_patch_of_a_module_is_named_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first model is made, and after it. What is no function, or is new, is none."""
    room, other = ModuleType("llm.models.made_up"), ModuleType("llm.models.made_up_too")
    for module in (room, other):
        vars(module).update(helper=watch.define, borrowed=functools.partial, constant=3, kind=Counted)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(other)["helper"] = hooked
    modules = [Counted()]
    is_watched = Watch(modules)
    assert is_watched() and list(patches_of(modules)) == [("models.made_up_too.helper", hooked)]
    other.helper = watch.define  # type: ignore[attr-defined]
    is_watched = settled(modules)
    room.constant, room.kind, room.new = 4, Patchable, hooked  # type: ignore[attr-defined]
    assert not is_watched()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(room, "helper", hooked)
            assert all(is_watched() for _ in range(5))
            assert list(patches_of(modules)) == [("models.made_up.helper", hooked)]
        assert not any(is_watched() for _ in range(5))


def test_what_is_set_on_one_object_is_named() -> None:
    module = Counted()
    module.forward = wrapped(print)  # type: ignore[method-assign]
    assert [name for name, _ in patches_of([module])] == ["Counted.forward of one object"]
