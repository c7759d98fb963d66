"""Which layer of a built model an adapter's module is, and which of its output channels.

Owns the refusals: a module that no layer here can add to is named, with the way to merge it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from llm.base.text import list_names, quote
from llm.errors import CheckpointError
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE
from llm.loading.adapters.experts import by_expert
from llm.loading.adapters.folder import AdapterFolder, Pair
from llm.loading.weight_map import WeightMap
from llm.quantization.absorbed import AbsorbedLinearMethod

_MERGE = "merge the adapter with LLM(model, merge_lora=folder)"


@dataclass(frozen=True)
class LayerTarget:
    """Output channels [first, first + channels) of a layer.

    Attributes:
        layer: the linear layer or the table.
        is_head: the table as the LM head, whose input are hidden states.
        arrange: brings the rows of the second matrix into the order of the layer's; None: they are.
        experts: the layer of experts that the layer is a part of.
    """

    layer: LinearBase | VocabParallelEmbedding
    is_head: bool
    first: int
    channels: int
    inputs: int
    arrange: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    experts: FusedMoE | None = None


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
        return [pair for pair in by_expert(folder, self._map) if not self._map.ignores(f"{pair.name}.weight")]

    def find(self, folder: AdapterFolder, pair: Pair) -> LayerTarget:
        """The target of a pair whose shapes are checked; raises `CheckpointError` if there is none."""
        target = self._map.target(f"{pair.name}.weight")
        layer = self._modules.get(target.parameter.rpartition(".")[0])
        found = None
        if isinstance(layer, LinearBase) and not pair.is_lookup and self._adds(layer):
            index = None if target.shard_id is None else layer.shard_ids.index(target.shard_id)
            first = 0 if index is None else sum(layer.output_sizes[:index])
            channels = layer.output_size if index is None else layer.output_sizes[index]
            arrange = self._map.restacking(target)
            experts = self._of_experts.get(id(layer))
            found = LayerTarget(layer, False, first, channels, layer.input_size, arrange, experts)
        elif isinstance(layer, VocabParallelEmbedding) and layer.is_plain:
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
        return layer.tp_size == 1 and not isinstance(layer.quant_method, AbsorbedLinearMethod)

    def _refusal(self, folder: AdapterFolder, pair: Pair, layer: nn.Module | None) -> CheckpointError:
        if layer is None and not any(name.startswith(f"{pair.name}.") for name in self._modules):
            what = "which is no layer of this model by itself"
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
