"""Maps checkpoint tensors to parameters.

A model's renames and packed modules are data on its class. Names are compared by whole path segments, never by
substring.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from llm.errors import CheckpointError
from llm.models.interface import Cut


class Target(NamedTuple):
    """The parameter of a tensor, and its shard of a fused parameter ("q", 0, ...; None: all of it)."""

    parameter: str
    shard_id: str | int | None


class WeightMap:
    """Checkpoint names -> parameters of `model` (see `llm.models.interface.CausalLM` for the data it declares).

    `parameter_name` comes before the model's renames.
    """

    def __init__(self, model: nn.Module, parameter_name: Callable[[str], str] = lambda name: name) -> None:
        self._parameter_name = parameter_name
        self._renames: tuple[tuple[str, str], ...] = getattr(model, "renames", ())
        self._renames += getattr(model, "further_renames", ())
        self._rename_weight: Callable[[str], str] | None = getattr(model, "rename_weight", None)
        self._ignores_weight: Callable[[str], bool] | None = getattr(model, "ignores_weight", None)
        self._ignored = frozenset(getattr(model, "ignored_weights", ()))
        self._left_out = [prefix.split(".") for prefix in getattr(model, "left_out", ())]
        self._transposed = frozenset(getattr(model, "transposed_weights", ()))
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._parts = packed
        self._fused = {part: (name, index) for name, parts in packed.items() for index, part in enumerate(parts)}
        self._modules = dict(model.named_modules())
        self.stacked: Mapping[str, Cut] = getattr(model, "stacked_weights", {})

    def module(self, name: str) -> nn.Module | None:
        """The module that a checkpoint calls `name`."""
        return self._modules.get(self._rename(name))

    def ignores(self, name: str) -> bool:
        segments = name.split(".")
        if self._ignores_weight is not None and self._ignores_weight(name):
            return True
        return _ends_with(name, self._ignored) or any(_match(part, segments) is not None for part in self._left_out)

    def on_another_rank(self, name: str) -> bool:
        """Whether the tensor is of an expert that this rank has not."""
        segments = self._rename(self._parameter_name(name)).split(".")
        for end in range(1, len(segments)):
            asked = getattr(self._modules.get(".".join(segments[:end])), "on_another_rank", None)
            if asked is not None and asked(segments[end]):
                return True
        return False

    def target(self, name: str) -> Target:
        """The target of one checkpoint tensor. If it names no parameter, the loader reports that."""
        segments = self._rename(self._parameter_name(name)).split(".")
        for position, segment in enumerate(segments):
            if segment in self._fused:
                fused, index = self._fused[segment]
                path = [*segments[:position], fused]
                shard_ids = getattr(self._modules.get(".".join(path)), "shard_ids", ())
                if index < len(shard_ids):
                    return Target(".".join([*path, *segments[position + 1 :]]), shard_ids[index])
        return self._stacked(segments) or Target(".".join(segments), None)

    def by_part(self, names: Iterable[str], parts: Sequence[str]) -> dict[str, list[str]]:
        """Checkpoint names by the module, of these dotted paths, that their parameters are in; "": in none."""
        found: dict[str, list[str]] = {"": [], **{part: [] for part in parts}}
        for name in names:
            segments = self.target(name).parameter.split(".")
            paths = (".".join(segments[:end]) for end in range(len(segments), 0, -1))
            found[next((path for path in paths if path in found), "")].append(name)
        return found

    def parts(self, parameter: str) -> dict[str | int, str]:
        """Shard -> its name, of a fused parameter; {} of any other."""
        path, _, leaf = parameter.rpartition(".")
        parent, _, last = path.rpartition(".")
        shard_ids: tuple[str | int, ...] = getattr(self._modules.get(path), "shard_ids", ())
        pairs = zip(shard_ids, self._parts.get(last, ()), strict=False)
        return {shard_id: ".".join(filter(None, (parent, part, leaf))) for shard_id, part in pairs}

    def _stacked(self, segments: list[str]) -> Target | None:
        """The target of one expert's tensor in a layer that holds its experts stacked; None: there is no such layer."""
        owner = ".".join(segments[:-3])
        find = getattr(self._modules.get(owner), "stacked_parameter", None)
        found = find(*segments[-3:]) if find and len(segments) > 3 else None
        return found and Target(f"{owner}.{found[0]}", found[1])

    def transposed(self, parameter: str) -> bool:
        """True if the checkpoint stores this weight as [K, N] instead of [N, K]."""
        return _ends_with(parameter, self._transposed)

    def restacking(self, target: Target) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
        """What brings the tensor's rows into the order of the target's layer; None: they are in that order.

        `restacked` of a layer is for a tensor that fills all of it, `shard_restacked` for one of its shards.
        """
        module = self._modules.get(target.parameter.rpartition(".")[0])
        if target.shard_id is None:
            return getattr(module, "restacked", None)
        of_shard = getattr(module, "shard_restacked", None)
        return of_shard and partial(of_shard, shard_id=target.shard_id)

    def _rename(self, name: str) -> str:
        if self._rename_weight is not None:
            return self._rename_weight(name)
        return rename(name, self._renames)


def rename(name: str, renames: Sequence[tuple[str, str]]) -> str:
    """A checkpoint's name -> the model's, by the first matching entry of the model class's `renames`."""
    segments = name.split(".")
    for source, target in renames:
        pattern = source.split(".")
        wild = _match(pattern, segments)
        if wild is not None:
            filled = [wild.pop(0) if part == "*" else part for part in target.split(".")]
            return ".".join([*filled, *segments[len(pattern) :]])
    return name


def stored_name(name: str, renames: Sequence[tuple[str, str]], stored: Container[str]) -> str:
    """The checkpoint's name of a module: of the names that become `name`, the one in `stored`, if any is."""
    back = [(ours, theirs) for theirs, ours in renames]
    found = (rename(name, [pair]) for pair in back)
    return next((item for item in (*found, name) if item in stored), rename(name, back))


def _match(pattern: list[str], segments: list[str]) -> list[str] | None:
    """The segment that each "*" of the pattern matches, if the leading segments match it; else None."""
    if len(segments) < len(pattern):
        return None
    pairs = list(zip(pattern, segments, strict=False))
    if any(wanted not in ("*", got) for wanted, got in pairs):
        return None
    return [got for wanted, got in pairs if wanted == "*"]


def _ends_with(name: str, endings: frozenset[str]) -> bool:
    """True if the name ends with one of the endings, by whole segments."""
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def per_expert(name: str, tensor: torch.Tensor, weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensor as (name, tensor) of each expert: views; itself where it is not stacked.

    Raises `CheckpointError` where its first dimension is not the number of experts.
    """
    ending = _ending(name, weight_map.stacked)
    start = name[: len(name) - len(ending)] if ending else ""
    experts = weight_map.module(f"{start}experts")
    count: int | None = getattr(experts, "num_experts", None)
    if ending is None or count is None:
        yield name, tensor
        return
    if tensor.dim() < 2 or tensor.shape[0] != count:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, the model has {count} experts.")
    for index, part in enumerate(tensor):
        for last, weight in weight_map.stacked[ending](part):
            yield f"{start}experts.{index}.{last}", weight


def _ending(name: str, stacked: Mapping[str, Cut]) -> str | None:
    return next((ending for ending in stacked if name.endswith(f".{ending}")), None)
