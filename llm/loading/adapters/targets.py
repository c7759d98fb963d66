"""Which layer of a built model an adapter's module is, and which of its output channels; and merging an adapter.

A module that no layer here can add to is named, with the way to merge it instead.

Adapters of stacked experts (PEFT's `target_parameters`) become one pair of matrices per expert and layer.
transformers 5 holds a matrix of all experts as one parameter, and PEFT one pair of tensors for it: [experts * rank,
in], expert by expert, and [out, rank * experts], the experts last. Which of the two is over the expert's inputs depends
on the versions that wrote the adapter: the shapes tell.

`MergedTensors` adds an adapter to a checkpoint's weights while they are read, before they are quantized or packed:
W + scale * B A in float32, with DoRA's magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from llm.base.text import list_names, quote
from llm.errors import CheckpointError
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.latent_attention import AbsorbedLinearMethod
from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE
from llm.loading.adapters.folder import AdapterFolder, ExpertPart, Pair
from llm.loading.checkpoint import TensorInfo
from llm.loading.source import Tensors
from llm.loading.weight_map import WeightMap, per_expert
from llm.models.interface import Cut

_MERGE = "merge the adapter with LLM(model, merge_lora=folder)"

# Parts of models that read images, beside the language model.
_OF_TOWERS = frozenset("visual vision_tower vision_model multi_modal_projector connector embed_vision".split())


@dataclass(frozen=True)
class LayerTarget:
    """Output channels of a layer.

    Attributes:
        layer: the linear layer or the table.
        is_head: the table as the LM head, whose input are hidden states.
        first: the first of them among those that this rank computes.
        channels, inputs: of the adapter's matrices, of all ranks.
        arrange: brings the rows of the second matrix into the order of the layer's; None: they are.
        experts: the layer of experts that the layer is a part of.
        shard_id: the layer's name for them; None: they are all that it has.
    """

    layer: LinearBase | VocabParallelEmbedding
    is_head: bool
    first: int
    channels: int
    inputs: int
    arrange: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    experts: FusedMoE | None = None
    shard_id: object = None

    @property
    def width(self) -> int:
        """Of what this rank computes of the layer's output."""
        if isinstance(self.layer, LinearBase):
            return self.layer.output_size_per_partition
        return self.layer.shard.rows if self.is_head else self.channels

    def of_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the second matrix or its bias: of a looked up row, all."""
        if isinstance(self.layer, VocabParallelEmbedding) and not self.is_head:
            return rows
        return self.layer.rows_of_rank(rows, self.shard_id)


class Targets:
    """The layers of `model` by the names that PEFT gives to modules."""

    def __init__(self, model: nn.Module) -> None:
        self._map = WeightMap(model)
        # A tied LM head has the embedding's module under a second name.
        self._modules = dict(model.named_modules(remove_duplicate=False))
        blocks = [module for module in model.modules() if isinstance(module, FusedMoE)]
        self._of_experts = {id(layer): block for block in blocks for layer in block.modules()}

    def computed(self, folder: AdapterFolder) -> list[Pair]:
        """The pairs of layers that are computed: not of what the model leaves out, such as an encoder's unused head."""
        found = []
        for pair in by_expert(folder, self._map):
            if not self._map.ignores(f"{pair.name}.weight"):
                found.append(pair)
            elif not _OF_TOWERS.isdisjoint(pair.name.split(".")):
                raise CheckpointError(
                    f"the adapter in {folder.folder} changes {quote(pair.name)}, of the vision tower; adapters change "
                    "the language model alone; leave these layers out when it is trained."
                )
        return found

    def find(self, folder: AdapterFolder, pair: Pair) -> LayerTarget:
        """The target of a pair whose shapes are checked; raises `CheckpointError` if there is none."""
        target = self._map.target(f"{pair.name}.weight")
        layer = self._modules.get(target.parameter.rpartition(".")[0])
        found = None
        if isinstance(layer, LinearBase) and not pair.is_lookup and self._adds(layer):
            index = None if target.shard_id is None else layer.shard_ids.index(target.shard_id)
            first = 0 if index is None else sum(layer.output_partition_sizes[:index])
            channels = layer.output_size if index is None else layer.output_sizes[index]
            arrange = self._map.restacking(target)
            experts = self._of_experts.get(id(layer))
            shard_id = target.shard_id
            found = LayerTarget(layer, False, first, channels, layer.input_size, arrange, experts, shard_id)
        elif isinstance(layer, VocabParallelEmbedding) and layer.is_in_order:
            width, ids = layer.embedding_dim, layer.num_embeddings
            if pair.is_lookup:
                found = LayerTarget(layer, False, 0, width, ids)
            elif layer.is_lm_head:
                found = LayerTarget(layer, True, 0, ids, width)
        if found is None:
            raise self._refusal(folder, pair, layer)
        folder.check_shapes(pair, found.inputs, found.channels)
        return found

    def _adds(self, layer: LinearBase) -> bool:
        """Whether the layer itself computes: latent attention reads `kv_b_proj` in parts."""
        return not self._is_elsewhere(layer) and not isinstance(layer.quant_method, AbsorbedLinearMethod)

    def _is_elsewhere(self, layer: nn.Module | None) -> bool:
        """Whether the layer is of an expert, and ranks have some of them each."""
        experts = self._of_experts.get(id(layer))
        return isinstance(experts, FusedMoE) and experts.tp.size > 1

    def _refusal(self, folder: AdapterFolder, pair: Pair, layer: nn.Module | None) -> CheckpointError:
        if layer is None and not any(name.startswith(f"{pair.name}.") for name in self._modules):
            what = "which is no layer of this model by itself"
        elif self._is_elsewhere(layer):
            what = "of an expert, which with tensor_parallel_size one rank has"
        else:
            what = f"a {type(layer).__name__}" if layer is not None else "which holds layers"
        base = f" (it was trained for {quote(folder.config.base)})" if folder.config.base else ""
        return CheckpointError(
            f"the adapter in {folder.folder} changes {quote(pair.name)}, {what}, and cannot be switched per row"
            f"{base}; if it belongs to this model, {_MERGE}."
        )


def check_switchable(folder: AdapterFolder, pairs: Sequence[Pair], max_lora_rank: int) -> None:
    """Raise `CheckpointError` for what only merging can do, and for a rank that was not planned for."""
    config, name = folder.config, folder.folder
    if config.use_dora or any(pair.magnitude for pair in folder.pairs.values()):
        raise CheckpointError(f"the adapter in {name} has use_dora, which cannot be switched per row; {_MERGE}.")
    if folder.replaced:
        why = "modules_to_save" if config.bias == "none" else f"modules_to_save or bias={config.bias!r}"
        raise CheckpointError(
            f"the adapter in {name} has whole tensors ({why}: {list_names(folder.replaced, 3)}), which cannot be "
            f"switched per row; {_MERGE}."
        )
    rank = max((config.rank_of(pair.key) for pair in pairs), default=0)
    if rank > max_lora_rank:
        raise CheckpointError(
            f"the adapter in {name} has rank {rank} and max_lora_rank is {max_lora_rank}; pass "
            f"LLM(enable_lora=True, max_lora_rank={rank})."
        )


_MERGE_EXPERTS = "merge it with PEFT (merge_and_unload) and load the model that is saved"
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
                f"inputs: all its sides are equal; {_MERGE_EXPERTS}."
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


_INSTEAD = "pass LLM(enable_lora=True) and lora_request in each call"


class MergedTensors:
    """The tensors of a checkpoint, with what an adapter adds to them.

    Args:
        model: built; its names are where checkpoint and adapter meet.

    Raises:
        CheckpointError: the adapter has what cannot be merged.
    """

    def __init__(self, tensors: Tensors, adapter: AdapterFolder, model: nn.Module) -> None:
        self._tensors = tensors
        self._adapter = adapter
        self._map = WeightMap(model)
        self._pairs = {self._map.target(f"{pair.name}.weight"): pair for pair in by_expert(adapter, self._map)}
        self._replaced = {self._map.target(name): tensor for name, tensor in adapter.replaced.items()}
        every = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        shared = {name for name, parameter in model.named_parameters() if sum(parameter is one for one in every) > 1}
        for target, pair in self._pairs.items():
            if target.parameter in shared:
                raise self._refusal(pair, "is the LM head too, which it would change")
            if pair.up_bias or (pair.is_lookup and pair.magnitude):
                raise self._refusal(pair, "has lora_bias" if pair.up_bias else "has use_dora")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors.tensors

    @property
    def total_bytes(self) -> int:
        return self._tensors.total_bytes

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises `CheckpointError` at the end if the adapter has a module that the checkpoint does not."""
        left = {target: pair.name for target, pair in self._pairs.items()} | self._replaced
        for name, tensor in self._pieces():
            target = self._map.target(name)
            if left.pop(target, None) is None:
                yield name, tensor
            elif target in self._replaced:
                yield name, self._replacement(tensor, self._replaced[target])
            else:
                turned = self._map.transposed(target.parameter)
                total = self._sum(name, tensor.t() if turned else tensor, self._pairs[target])
                yield name, total.t() if turned else total
        if left:
            base = self._adapter.config.base
            trained = f"; it was trained for {quote(base)}" if base else ""
            raise CheckpointError(
                f"the adapter in {self._adapter.folder} changes {list_names(left.values(), 3)}, which the checkpoint "
                f"does not have as floats{trained}."
            )

    def _pieces(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors; stacked ones expert by expert, where the adapter changes experts."""
        changes = any(pair.part is not None for pair in self._pairs.values())
        for name, tensor in self._tensors.stream():
            if changes:
                yield from per_expert(name, tensor, self._map)
            else:
                yield name, tensor

    def _replacement(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        own = self._adapter.load(name)
        if own.shape != tensor.shape:
            raise self._misfit(name, own.shape, tensor.shape)
        return own.to(tensor.dtype)

    def _sum(self, name: str, tensor: torch.Tensor, pair: Pair) -> torch.Tensor:
        """`tensor` [N, K], of an embedding [ids, channels], with the product of the pair."""
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2 or tensor.dim() != 2:
            what = f"{quote(name)} is stored as {tensor.dtype}"
            raise CheckpointError(f"merge_lora needs a checkpoint of floats, and {what}; {_INSTEAD}.")
        channels, inputs = reversed(tensor.shape) if pair.is_lookup else tensor.shape
        self._adapter.check_shapes(pair, inputs, channels)
        down, up, _ = self._adapter.matrices(pair)
        delta = self._adapter.config.scale_of(pair.key) * (up.float() @ down.float())
        total = tensor.float() + (delta.t() if pair.is_lookup else delta)
        if pair.magnitude:
            total *= (self._magnitude(pair, channels) / total.norm(dim=1)).unsqueeze(1)
        return total.to(tensor.dtype)

    def _magnitude(self, pair: Pair, channels: int) -> torch.Tensor:
        info = self._adapter.tensors[pair.magnitude]
        if info.shape != (channels,):
            raise self._misfit(pair.magnitude, info.shape, (channels,))
        return self._adapter.load(pair.magnitude).float()

    def _refusal(self, pair: Pair, why: str) -> CheckpointError:
        return CheckpointError(
            f"the adapter in {self._adapter.folder} cannot be merged: {quote(pair.name)} {why}; {_INSTEAD}."
        )

    def _misfit(self, name: str, shape: Sequence[int], wanted: Sequence[int]) -> CheckpointError:
        sizes = f"has shape {list(shape)}, the model needs {list(wanted)}"
        return CheckpointError(f"{self._adapter.folder}: {quote(name)} {sizes}.")
