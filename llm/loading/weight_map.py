"""Where a checkpoint tensor goes.

Owns the interpretation of a model's renames and packed modules, which are data on the model class. Names are compared
by whole path segments, never by substring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Target(NamedTuple):
    """The parameter a tensor belongs to, and the part of it when it is fused ("q", 0, ...; None: all)."""

    parameter: str
    shard_id: Any


class WeightMap:
    """Checkpoint names -> parameters of `model` (see `llm.models.interface.CausalLM` for the data it declares)."""

    def __init__(self, model: nn.Module) -> None:
        declared: Any = model
        self._renames: tuple[tuple[str, str], ...] = getattr(declared, "renames", ())
        self._ignored = frozenset(getattr(declared, "ignored_weights", ()))
        packed: dict[str, list[str]] = getattr(declared, "packed_modules_mapping", {})
        self._fused = {part: (name, index) for name, parts in packed.items() for index, part in enumerate(parts)}
        self._modules = dict(model.named_modules())

    def ignores(self, name: str) -> bool:
        return name.rpartition(".")[2] in self._ignored

    def target(self, name: str) -> Target:
        """The target of one checkpoint tensor; it may name no parameter, which the loader reports."""
        segments = self._rename(name).split(".")
        for position, segment in enumerate(segments):
            if segment in self._fused:
                fused, index = self._fused[segment]
                path = [*segments[:position], fused]
                shard_ids = getattr(self._modules.get(".".join(path)), "shard_ids", ())
                if index < len(shard_ids):
                    return Target(".".join([*path, *segments[position + 1 :]]), shard_ids[index])
        return Target(".".join(segments), None)

    def _rename(self, name: str) -> str:
        for source, target in self._renames:
            if name == source or name.startswith(source + "."):
                rest = name[len(source) :].lstrip(".")
                return ".".join(part for part in (target, rest) if part)
        return name
