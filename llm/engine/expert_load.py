"""How many tokens each expert of a runner's model computes: hooks, and the counts they leave behind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from llm.layers.moe import FusedMoE

Hook = Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor], torch.Tensor], None]


class ExpertCounter:
    """Counts the tokens of each expert of every layer of experts of `model`, until `stop`."""

    def __init__(self, model: nn.Module) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, FusedMoE)}
        # A gated expert that every token has is a layer of one.
        self._counts = {name: [0] * layer.num_experts for name, layer in layers.items() if layer.num_experts > 1}
        self._hooks: list[RemovableHandle] = [
            layers[name].register_forward_hook(self._adder(layers[name], counts))
            for name, counts in self._counts.items()
        ]

    def stop(self) -> dict[str, list[int]]:
        """Take the hooks off; tokens by expert, by the dotted path of the layer."""
        for hook in self._hooks:
            hook.remove()
        return self._counts

    @staticmethod
    def _adder(layer: FusedMoE, counts: list[int]) -> Hook:
        def add(module: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
            chosen = torch.bincount(layer.select(*inputs)[1].flatten(), minlength=len(counts))
            counts[:] = [before + more for before, more in zip(counts, chosen.tolist(), strict=True)]

        return add
