"""What a runner finds out about its model: its layers, their inputs and outputs, what varies with the batch.

Hooks observe or keep inputs and outputs, for calibration and the quantization report. A hooked expert is called by
itself, with its own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from llm.base.custom_op import CustomOp, replaced_class, replacement_reason
from llm.engine.boundary import Captured, LayerReport
from llm.layers.attention import Attention, PagedAttention
from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE
from llm.quantization.absorbed import AbsorbedLinearMethod
from llm.quantization.base import QuantizationConfig
from llm.quantization.quantizer import decibels, far_layers
from llm.quantization.storage.on_load import ActivationStatistics, QuantizeOnLoad
from llm.quantization.storage.requantized import Requantized


def layer_reports(model: Any, weight_dtype: torch.dtype) -> list[LayerReport]:
    """Every layer with a weight, in the model's order; `weight_dtype` is that of the unquantized weights."""
    reports = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE) and not module.experts:
            reports.append(_layer_report(name, module, weight_dtype))
        elif isinstance(module, FusedMoE):
            parts = [part for expert in module.experts for part in expert.modules() if hasattr(part, "quant_method")]
            inside.update(map(id, parts))
            reports.append(_together(name, [_layer_report("", part, weight_dtype) for part in parts], parts))
        elif id(module) not in inside and _has_one_weight(module):
            reports.append(_layer_report(name, module, weight_dtype))
    return reports


def _has_one_weight(module: nn.Module) -> bool:
    kind = getattr(module, "quant_kind", "")
    return kind in ("linear", "embedding") and getattr(module, "quant_method", None) is not None


def _layer_report(name: str, module: Any, weight_dtype: torch.dtype) -> LayerReport:
    method, after = module.quant_method, _stored_bytes(module)
    packed = getattr(module, "packed_weight", None) if method.scheme else None
    before = packed.n * packed.k * weight_dtype.itemsize if packed is not None else after
    snr = getattr(getattr(method, "storage", None), "signal_to_noise", None)
    return LayerReport(name, method.scheme, before, after, snr, kind=module.quant_kind)


def _together(name: str, reports: list[LayerReport], parts: list[nn.Module]) -> LayerReport:
    """One report of a layer of experts; its schemes where they differ are joined."""
    schemes = dict.fromkeys(report.scheme or "-" for report in reports)
    before, after = sum(item.bytes_before for item in reports), sum(item.bytes_after for item in reports)
    storages = [getattr(part.quant_method, "storage", None) for part in parts]
    energies = [item.energies for item in storages if isinstance(item, QuantizeOnLoad | Requantized)]
    snr = decibels(*map(sum, zip(*energies, strict=True))) if energies else None
    scheme = "" if list(schemes) == ["-"] else ", ".join(schemes)
    return LayerReport(name, scheme, before, after, snr, kind="moe")


def _stored_bytes(module: Any) -> int:
    """Bytes of the layer's weight in memory, without its bias."""
    tensors = [*module.buffers(recurse=False), *module.parameters(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not getattr(module, "bias", None))


# Channels per block of the second moment: a matrix over all channels would be larger than the model.
_RUN = 512


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


def what_varies(model: nn.Module) -> str | None:
    """Why answers may depend on the batch: something other than the backend's kernels computes a layer; None if not.

    `Backend.invariant` says whether those kernels are batch-invariant.
    """
    own: str | None = getattr(model, "varies", None)
    if own is not None:
        return own
    for module in model.modules():
        if replaced_class(type(module)) is not None:
            return replacement_reason(type(module))
        if isinstance(module, CustomOp) and type(module).dispatch_forward is not CustomOp.dispatch_forward:
            return f"{type(module).__name__} chooses its method itself"
        op = module if isinstance(module, CustomOp) and not module.is_layer else None
        if op is not None and op.binding.is_off:
            return f"{op.name} is {op.binding.reason}: PyTorch's own operations compute it"
        if isinstance(module, FusedMoE) and not isinstance(module.custom_routing_function, CustomOp | None):
            return "a custom_routing_function chooses experts"
        if isinstance(module, Attention) and type(module.backend) is not PagedAttention:
            return f"attention is {type(module.backend).__name__}'s"
        if op is not None and op.binding.method == "forward_native":
            return f"{op.name} has no kernel ({op.binding.reason}): PyTorch's own operations compute it"
        method: Any = getattr(module, "quant_method", None)
        if method is not None and not method.invariant:
            return f"{method.scheme or type(method).__name__} has no invariant kernel"
    return None


def held_otherwise(model: nn.Module, config: QuantizationConfig | None) -> str:
    """What `llm.config` tells of how weights are held: which of them in another form than others; "" for nothing."""
    named = [(name, getattr(module, "quant_method", None)) for name, module in model.named_modules()]
    methods = [method for _, method in named]
    stored = dict.fromkeys(method.stored_as for method in methods if isinstance(method, AbsorbedLinearMethod))
    schemes = ", ".join(filter(None, stored))
    told = Counter(filter(None, (getattr(method, "told", "") for method in methods)))
    parts = []
    if config is not None and config.told:
        weights = [getattr(module, "packed_weight", None) for _, module in linear_layers(model)]
        held = [part for weight in weights if weight is not None for part in weight.memory().values()]
        size = sum(part.nbytes for part in held if part is not None)
        parts.append(f"{config.told}; with their scales they take {size:,} bytes")
    parts += [f"{count} {'layer' if count == 1 else 'layers'} {what}" for what, count in told.items()]
    if schemes:
        parts.append(f"kv_b_proj, {schemes} in the checkpoint, is held as float32: latent attention reads it in parts")
    storages = [(name, getattr(method, "storage", None)) for name, method in named]
    measured = [(name, getattr(storage, "signal_to_noise", None)) for name, storage in storages]
    parts += far_layers([(name, ratio) for name, ratio in measured if ratio is not None])
    return "; ".join(parts)
