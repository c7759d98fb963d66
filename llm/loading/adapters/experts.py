"""Adapters of stacked experts (PEFT's `target_parameters`), as one pair of matrices per expert and layer.

transformers 5 holds a matrix of all experts as one parameter, and PEFT one pair of tensors for it: [experts * rank,
in], expert by expert, and [out, rank * experts], the experts last. Which of the two is over the expert's inputs depends
on the versions that wrote the adapter: the shapes tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from llm.base.text import quote
from llm.errors import CheckpointError
from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE
from llm.loading.adapters.folder import AdapterFolder, ExpertPart, Pair
from llm.loading.weight_map import WeightMap
from llm.models.interface import Cut

_MERGE = "merge it with PEFT (merge_and_unload) and load the model that is saved"
_NESTED = ".base_layer"  # PEFT wraps a module once per parameter


def by_expert(folder: AdapterFolder, weight_map: WeightMap) -> list[Pair]:
    """The pairs of an adapter; those of stacked experts are one per expert and matrix of the checkpoint.

    Raises:
        CheckpointError: a stack that is not of this model's experts.
    """
    found: list[Pair] = []
    stacks: dict[FusedMoE, list[Pair]] = {}
    for pair in folder.pairs.values():
        module = _unwrapped(pair.name)
        experts = weight_map.module(module)
        if isinstance(experts, FusedMoE) and experts.experts:
            stacks.setdefault(experts, []).append(replace(pair, name=module))
        elif "weight" in folder.config.parameters_of(module):  # of a linear layer, as if the module had been adapted
            found.append(replace(pair, key=f"{module}.weight"))
        else:
            found.append(pair)
    for experts, pairs in stacks.items():
        found += _Stacks(folder, pairs[0].name, experts, weight_map).parts(pairs)
    return found


def _unwrapped(module: str) -> str:
    while module.endswith(_NESTED):
        module = module.removesuffix(_NESTED)
    return module


class _Stacks:
    """The pairs of one module of experts."""

    def __init__(self, folder: AdapterFolder, module: str, experts: FusedMoE, weight_map: WeightMap) -> None:
        self._folder = folder
        self._module = module
        self._count = experts.num_experts
        # Parameter -> (channels, inputs) of one expert, and how it is cut into the checkpoint's matrices.
        self._sizes: dict[str, tuple[int, int]] = {}
        self._cuts: dict[str, Cut] = {}
        for name in folder.config.parameters_of(module):
            layer, cut = getattr(experts.experts[0], name, None), weight_map.stacked.get(f"experts.{name}")
            if isinstance(layer, LinearBase) and cut is not None:
                self._sizes[name], self._cuts[name] = (layer.output_size, layer.input_size), cut

    def parts(self, pairs: list[Pair]) -> list[Pair]:
        found = [(pair, *self._parameter(pair)) for pair in pairs]
        # All parameters of a module are stored in one way.
        ways = set.intersection(*(ways for _, _, ways in found))
        if len(ways) != 1:
            raise CheckpointError(
                f"the adapter in {self._folder.folder} does not say which matrix of {quote(self._module)} is over the "
                f"inputs: all its sides are equal; {_MERGE}."
            )
        return [part for pair, name, _ in found for part in self._of(pair, name, next(iter(ways)))]

    def _parameter(self, pair: Pair) -> tuple[str, set[bool]]:
        """What a pair is of, and whether its matrices may be exchanged: the first is then over the channels."""
        down, up = (self._folder.tensors[name] for name in (pair.down, pair.up))
        for name, (channels, inputs) in self._sizes.items():
            ranks = self._count * self._folder.config.rank_of(f"{self._module}.{name}")
            ways = {False: (inputs, channels), True: (channels, inputs)}
            fits = {way for way, (a, b) in ways.items() if down.shape == (ranks, a) and up.shape == (b, ranks)}
            if fits and all(info.dtype.is_floating_point and info.dtype.itemsize > 1 for info in (down, up)):
                return name, fits
        sizes = [f"{name} of {channels} by {inputs}" for name, (channels, inputs) in self._sizes.items()]
        parameters = " and ".join(sizes) or "other parameters"
        raise CheckpointError(
            f"the adapter in {self._folder.folder} does not fit this model: {quote(pair.down)} has shape "
            f"{list(down.shape)} and {quote(pair.up)} {list(up.shape)}, the model has {self._count} experts with "
            f"{parameters}."
        )

    def _of(self, pair: Pair, parameter: str, is_exchanged: bool) -> Iterator[Pair]:
        cut, (channels, inputs) = self._cuts[parameter], self._sizes[parameter]
        is_turned = _is_turned(cut)
        names = [name for name, _ in cut(torch.empty(2, 2))]
        for index in range(self._count):
            for place, name in enumerate(names):
                part = ExpertPart(
                    index, self._count, is_exchanged, is_turned, cut, place, channels // len(names), inputs
                )
                own = f"{self._module}.{index}.{name.removesuffix('.weight')}"
                yield replace(pair, name=own, key=f"{self._module}.{parameter}", part=part)


def _is_turned(cut: Cut) -> bool:
    """Whether the checkpoint stores one expert's matrix as [inputs, channels]."""
    probe = torch.arange(12).view(4, 3)
    _, first = next(iter(cut(probe)))
    return not torch.equal(first[0], probe[0])
