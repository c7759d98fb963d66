"""Hooks that observe or keep the inputs and outputs of layers, for calibration and the quantization report.

Owns the hooks and the statistics. Their results are plain data. A hooked expert is called by itself, with its own
tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE
from llm.quantization.storage.on_load import ActivationStatistics

# Channels per block of the second moment: a matrix over all channels would be larger than the model.
_RUN = 512

# Dotted path of a layer -> its inputs and its output, float [N, columns] each.
Captured = dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor]]


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(dotted path, layer) of every linear layer."""
    for name, module in model.named_modules():
        if getattr(module, "quant_kind", "") == "linear":
            yield name, module


def compared_layers(model: nn.Module) -> Iterator[tuple[str, FusedMoE | LinearBase]]:
    """(dotted path, layer) of every linear layer, and of layers of experts in the place of those inside them."""
    owners = _expert_layers(model)
    yield from owners.items()
    for name, layer in linear_layers(model):
        if _owner(name, owners) is None:
            yield name, layer


def _expert_layers(model: nn.Module) -> dict[str, FusedMoE]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FusedMoE)}


def _owner(name: str, owners: Iterable[str]) -> str | None:
    """The layer of experts that the linear layer `name` lies in."""
    path = name.rpartition(".")[0].rpartition(".")[0]
    return path if path in owners else None


class InputObserver:
    """Sums over the inputs of each linear layer of `model` on `device`, until `stop`.

    The experts of a layer share their sums: separate ones would be larger than the model, and each of few tokens.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        owners = _expert_layers(model)
        self._sums: dict[str, _InputSums] = {}
        self._rows: Counter[str] = Counter()
        self._keys: dict[str, str] = {}
        self._hooks: list[RemovableHandle] = []
        for name, layer in linear_layers(model):
            owner = _owner(name, owners)
            key = self._keys[name] = name if owner is None else f"{owner}.{name.rpartition('.')[2]}"
            if key not in self._sums:
                self._sums[key] = _InputSums(layer.input_size, device)
            self._hooks.append(layer.register_forward_pre_hook(self._adder(name, self._sums[key])))

    def _adder(self, name: str, sums: _InputSums) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self._rows[name] += sums.add(inputs[0])

        return add

    def stop(self) -> dict[str, ActivationStatistics]:
        """Remove the hooks; returns the statistics by dotted path."""
        _remove(self._hooks)
        shared = {key: sums.statistics() for key, sums in self._sums.items()}
        return {name: replace(shared[key], rows=self._rows[name]) for name, key in self._keys.items()}


class _InputSums:
    """Sums over the inputs of one layer, or of the experts of one layer."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._moments = [
            torch.zeros(width, width, dtype=torch.float64, device=device)
            for width in (min(_RUN, columns - start) for start in range(0, columns, _RUN))
        ]
        self._rows = 0
        self._low = self._high = 0.0

    def add(self, x: torch.Tensor) -> int:
        """Returns how many rows `x` has."""
        x = x.reshape(-1, x.shape[-1])
        for run, moment in zip(x.double().split(_RUN, dim=1), self._moments, strict=True):
            moment.addmm_(run.t(), run)
        self._rows += x.shape[0]
        self._low = min(self._low, float(x.min()))
        self._high = max(self._high, float(x.max()))
        return x.shape[0]

    def statistics(self) -> ActivationStatistics:
        moments = [_shrunk(moment.cpu() / max(1, self._rows), self._rows) for moment in self._moments]
        return ActivationStatistics(self._low, self._high, moments, self._rows)


def _shrunk(moment: torch.Tensor, rows: int) -> torch.Tensor:
    """A second moment shrunk towards a multiple of the identity, the more the fewer tokens (`rows`) it is from.

    Without this, calibration on a few sentences is three times worse than no calibration.
    """
    size = len(moment)
    known = rows / (rows + size)
    unknown = (1 - known) * moment.diagonal().mean() * torch.eye(size, dtype=moment.dtype)
    return (known * moment + unknown).float()


class LayerCapture:
    """Keeps the inputs and outputs of some of the `compared_layers` of `model`, until they are taken.

    Args:
        names: dotted paths of the layers.
        limit_bytes: capture only the first layers that together need at most this in a step of `tokens` tokens; at
            least one.

    Attributes:
        names: the captured layers.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], tokens: int, limit_bytes: int) -> None:
        layers = dict(compared_layers(model))
        self.names: list[str] = []
        self._held: Captured = {}
        self._hooks: list[RemovableHandle] = []
        needed = 0
        for name in names:
            layer = layers[name]
            needed += tokens * _columns(layer) * torch.float32.itemsize
            if self.names and needed > limit_bytes:
                break
            self.names.append(name)
            self._hooks.append(layer.register_forward_hook(self._keeper(name)))

    def take(self) -> Captured:
        """The inputs and outputs since the last call."""
        held, self._held = self._held, {}
        return held

    def stop(self) -> None:
        _remove(self._hooks)

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            # Cloned: later operations of the step reuse the memory.
            self._held[name] = tuple(x.clone() for x in inputs), output.clone()

        return keep


def layer_noise(model: nn.Module, captured: Captured) -> dict[str, tuple[float, float]]:
    """By layer: (sum of squares of the captured outputs, of this model's errors on the captured inputs)."""
    layers = dict(compared_layers(model))
    found = {}
    for name, (inputs, output) in captured.items():
        error = layers[name](*inputs) - output
        found[name] = float(output.double().square().sum()), float(error.double().square().sum())
    return found


def _columns(layer: FusedMoE | LinearBase) -> int:
    """Of what a layer is given and gives."""
    if isinstance(layer, FusedMoE):
        return 2 * layer.hidden_size + layer.num_experts
    return layer.input_size + layer.output_size


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
