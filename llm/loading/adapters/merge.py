"""Adding an adapter to the weights of a checkpoint while they are read, before they are quantized or packed.

The sum is W + scale * B A in float32, with DoRA's magnitudes. Which parameter a tensor fills is
`llm.loading.weight_map`'s: names of checkpoint and adapter meet there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from llm.base.text import list_names, quote
from llm.errors import CheckpointError
from llm.loading.adapters.folder import AdapterFolder, Pair
from llm.loading.adapters.targets import by_expert
from llm.loading.checkpoint import TensorInfo
from llm.loading.source import Tensors
from llm.loading.weight_map import WeightMap, per_expert

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
