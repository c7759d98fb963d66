"""Which modules a forward pass of transformers calls, and putting our operations in their places.

Owns `Called`, filled by hooks while the skeleton runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from llm.models.transformers_backend.invariance import Uses
from llm.models.transformers_backend.recognise import Replacement, recognise
from llm.models.transformers_backend.stubs import forget_weights
from llm.models.transformers_backend.tables import PositionTable, is_table
from llm.models.transformers_backend.theirs import Theirs


class Called:
    """Which modules a forward pass calls, and which of them with one tensor alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: set[str] = set()
        self._tables: dict[str, None] = {}
        self._recognised: dict[str, Replacement] | None = None
        self._widths: dict[str, int] = {}
        self._others: set[str] = set()
        self._handles: list[Theirs] = []

    def __enter__(self) -> Called:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._noting(name), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _noting(self, name: str) -> Theirs:
        def note(module: nn.Module, args: tuple[Theirs, ...], kwargs: dict[str, Theirs], output: object) -> None:
            self.names.add(name)
            if is_table(module, args, kwargs, output):
                self._tables[name] = None
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                self._widths[name] = args[0].shape[-1]
            else:
                self._others.add(name)

        return note

    @property
    def tables(self) -> tuple[str, ...]:
        """Modules that compute something from positions alone."""
        return tuple(self._tables)

    def recognised(self) -> dict[str, Replacement]:
        """Module -> our operation with its values; of the modules as they were at the first call."""
        if self._recognised is None:
            self._recognised = self._recognise()
        return self._recognised

    def _recognise(self) -> dict[str, Replacement]:
        known: dict[int, Replacement | None] = {}
        found = {}
        for name, width in self._widths.items():
            module = self._model.get_submodule(name)
            if name in self._others or "forward" in vars(module):
                continue
            if id(module) not in known:
                known[id(module)] = recognise(module, width)
            replacement = known[id(module)]
            if replacement is not None:
                found[name] = replacement
        return found


def replace_module(model: nn.Module, name: str, replacement: Replacement) -> nn.Module:
    """Put our operation in the place of a module of the model, with its parameters."""
    kept, own = model.get_submodule(name), replacement.build()
    for key, parameter in kept.named_parameters(recurse=False):
        setattr(own, key, parameter)
    model.set_submodule(name, own)
    return own


def use_ours(model: nn.Module, linear: Sequence[str], called: Called) -> Uses:
    """Put our operations into the skeleton; returns a recorder of the others."""
    replacements = called.recognised()
    forget_weights(model, called.names.intersection(linear))
    for name, replacement in replacements.items():
        replace_module(model, name, replacement)
    for name in called.tables:
        model.set_submodule(name, PositionTable(model.get_submodule(name), 16))
    return Uses(model, linear, replacements, called.tables)


def of_a_kind(linear: Sequence[str], called: set[str]) -> tuple[str, ...]:
    """The linear layers that are called, and those with the same path but for numbers: experts without a token."""

    def kind(name: str) -> str:
        return ".".join("*" if part.isdecimal() else part for part in name.split("."))

    kinds = {kind(name) for name in called}
    return tuple(name for name in linear if kind(name) in kinds)
