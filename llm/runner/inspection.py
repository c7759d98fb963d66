"""What a runner finds out about its model: its sizes, what varies with the batch, its layers' inputs and outputs.

What a step reads and computes (`count_model`), whatever the backend: every step reads all GEMM weights (linear layers
and LM head, a tied table once) and the KV cache of its requests, and reads and writes their recurrent states. Every
token goes through every linear layer, every sampled position through the LM head. Of a layer of experts it is as many
as a token chooses: a step of several tokens reads more of them. Norms, rotary embeddings and softmax count as free.

Hooks observe or keep inputs and outputs, for calibration and the quantization report. A hooked expert is called by
itself, with its own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from llm.base.custom_op import CustomOp, replaced_class, replacement_reason
from llm.engine.boundary import AttentionCost, Captured, LayerReport, ModelCost, measured_weights
from llm.forward import StateSpec
from llm.kernels.weight import ExpertWeights, Weight
from llm.layers.attention import Attention, PagedAttention
from llm.layers.custom_op import KernelOp
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.latent_attention import AbsorbedLinearMethod, LatentAttention
from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE
from llm.quantization.base import QuantizationConfig
from llm.quantization.on_load import ActivationStatistics, QuantizeOnLoad
from llm.quantization.quantizer import decibels, far_layers
from llm.quantization.requantize import Requantized

# Channels per block of the second moment: a matrix over all channels would be larger than the model.
_RUN, _RUN_MULTIPLE = 1024, 128
Hook = Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor], torch.Tensor], None]


def count_model(model: nn.Module, kv_cache_dtype: torch.dtype, states: Sequence[StateSpec] = ()) -> ModelCost:
    """The sizes of a built model, quantized or not, whose layers keep these states."""
    head = getattr(model, "lm_head", None)
    layers = [module for module in model.modules() if hasattr(module, "quant_kind")]
    lookup_only = [module for module in layers if module.quant_kind == "embedding" and module is not head]
    attention = [module for module in model.modules() if isinstance(module, Attention | LatentAttention)]
    total = _stored_bytes(model.modules())
    mixtures = [module for module in model.modules() if isinstance(module, FusedMoE)]
    experts = [_stored_bytes(module.modules()) for module in mixtures]
    unchosen = sum(round(size * _unchosen(module)) for size, module in zip(experts, mixtures, strict=True))
    linear = sum(_matrix_elements(module) for module in layers if module.quant_kind != "embedding")
    unmet = sum(
        round(sum(_matrix_elements(part) for part in module.modules() if hasattr(part, "quant_kind")) * share)
        for module in model.modules()
        if (share := _unchosen(module))
    )
    return ModelCost(
        parameters=sum(_elements(module) for module in model.modules()),
        linear_weights=linear - unmet,
        head_weights=0 if head is None else _matrix_elements(head),
        bytes_per_step=total - _stored_bytes(iter(lookup_only)) - unchosen,
        chosen_bytes=sum(experts) - unchosen,
        weight_bytes=total,
        attention=Counter(attention_cost(module, kv_cache_dtype) for module in attention),
        state_bytes=sum(spec.bytes_per_request() for spec in states),
        arithmetic=frozenset(
            (weight.kind, weight.activations) for weight in _weights(model) if weight.activations != "float"
        ),
    )


def _weights(model: nn.Module) -> Iterator[Weight]:
    """The packed weights of all layers."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, ExpertWeights):
                yield from (*value.gate_up, *value.down)
            elif isinstance(value, Weight):
                yield value


def _unchosen(module: nn.Module) -> float:
    """The share of its experts that a token does not go to; 0 for anything but a layer of experts."""
    return 1 - module.top_k / module.num_experts if isinstance(module, FusedMoE) else 0.0


def stored_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The weights that a module itself holds. Packed weights may be attributes instead of parameters."""
    found: list[torch.Tensor] = list(module.parameters(recurse=False))
    if hasattr(module, "quant_kind"):
        found += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        found += list(module.buffers(recurse=False))
    return found


def matrix_sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a layer with a `quant_method`; None if its weight is not a single matrix."""
    if isinstance(layer, VocabParallelEmbedding):
        return layer.embedding_dim, layer.num_embeddings
    return (layer.input_size, layer.output_size) if isinstance(layer, LinearBase) else None


def attention_cost(layer: Attention | LatentAttention, kv_cache_dtype: torch.dtype) -> AttentionCost:
    bytes_per_token = layer.kv_cache_spec(kv_cache_dtype).bytes_per_token()
    return AttentionCost(layer.operations_per_pair, bytes_per_token, layer.sliding_window)


def _stored_bytes(modules: Iterator[nn.Module]) -> int:
    tensors = {id(tensor): tensor for module in modules for tensor in stored_tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _elements(module: nn.Module) -> int:
    """Number of logical weights that a module itself holds, however they are stored."""
    if not hasattr(module, "quant_kind"):
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))
    bias = getattr(module, "bias", None)
    return _matrix_elements(module) + (0 if bias is None else bias.numel())


def _matrix_elements(layer: nn.Module) -> int:
    sizes = matrix_sizes(layer)
    return sizes[0] * sizes[1] if sizes else sum(tensor.numel() for tensor in stored_tensors(layer))


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
        if op is not None and op.binding.method == "forward_native" and not _is_exact(op):
            return f"{op.name} has no kernel ({op.binding.reason}): PyTorch's own operations compute it"
        method: Any = getattr(module, "quant_method", None)
        if method is not None and not method.invariant:
            return f"{method.scheme or type(method).__name__} has no invariant kernel"
    return None


def _is_exact(op: CustomOp) -> bool:
    """PyTorch computes each element from those at its place, on this device."""
    if not isinstance(op, KernelOp) or type(op).forward_native is not KernelOp.forward_native:
        return False
    return bool(op.operations) and all(name in op.backend.exact for name in op.operations)


def held_otherwise(model: nn.Module, config: QuantizationConfig | None) -> str:
    """What `llm.config` says of how weights are held: which of them in another form than others; "" for nothing."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    stored = dict.fromkeys(method.stored_as for method in methods if isinstance(method, AbsorbedLinearMethod))
    schemes = ", ".join(filter(None, stored))
    summaries = Counter(filter(None, (getattr(method, "summary", "") for method in methods)))
    parts = []
    if config is not None and config.summary:
        weights = [getattr(module, "packed_weight", None) for _, module in linear_layers(model)]
        held = [part for weight in weights if weight is not None for part in weight.memory().values()]
        size = sum(part.nbytes for part in held if part is not None)
        parts.append(f"{config.summary}; with their scales they take {size:,} bytes")
    parts += [f"{count} {'layer' if count == 1 else 'layers'} {what}" for what, count in summaries.items()]
    if schemes:
        parts.append(f"kv_b_proj, {schemes} in the checkpoint, is held as float32: latent attention reads it in parts")
    return "; ".join(parts)


def far_from_stored(model: nn.Module) -> str:
    """The sentence of `far_layers` on a model that was quantized while it was read; "" for none."""
    return "".join(far_layers(measured_weights(layer_reports(model, torch.float32))))


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
    method, after = module.quant_method, _bytes_in_memory(module)
    packed = getattr(module, "packed_weight", None) if method.scheme else None
    before = packed.n * packed.k * weight_dtype.itemsize if packed is not None else after
    snr = getattr(getattr(method, "storage", None), "signal_to_noise", None)
    compensated = getattr(getattr(method, "storage", None), "compensates", False)
    return LayerReport(name, method.scheme, before, after, snr, kind=module.quant_kind, is_compensated=compensated)


def _together(name: str, reports: list[LayerReport], parts: list[nn.Module]) -> LayerReport:
    """One report of a layer of experts; its schemes where they differ are joined."""
    schemes = dict.fromkeys(report.scheme or "-" for report in reports)
    before, after = sum(item.bytes_before for item in reports), sum(item.bytes_after for item in reports)
    storages = [getattr(part.quant_method, "storage", None) for part in parts]
    energies = [item.energies for item in storages if isinstance(item, QuantizeOnLoad | Requantized)]
    snr = decibels(*map(sum, zip(*energies, strict=True))) if energies else None
    scheme = "" if list(schemes) == ["-"] else ", ".join(schemes)
    compensated = any(report.is_compensated for report in reports)
    return LayerReport(name, scheme, before, after, snr, kind="moe", is_compensated=compensated)


def _bytes_in_memory(module: Any) -> int:
    """Bytes of the layer's weight in memory, without its bias."""
    tensors = [*module.buffers(recurse=False), *module.parameters(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not getattr(module, "bias", None))


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
        self._moments = [torch.zeros(width, width, dtype=torch.float32, device=device) for width in _runs(columns)]
        self._rows = 0
        self._low = self._high = 0.0

    def add(self, x: torch.Tensor) -> int:
        """Returns how many rows `x` has."""
        x = x.reshape(-1, x.shape[-1])
        for run, moment in zip(x.float().split(_runs(x.shape[1]), dim=1), self._moments, strict=True):
            moment.addmm_(run.t(), run)
        self._rows += x.shape[0]
        low, high = x.aminmax()
        self._low, self._high = min(self._low, float(low)), max(self._high, float(high))
        return x.shape[0]

    def statistics(self) -> ActivationStatistics:
        moments = [_shrunk(moment.cpu() / max(1, self._rows), self._rows) for moment in self._moments]
        return ActivationStatistics(self._low, self._high, moments, self._rows)


def _runs(columns: int) -> list[int]:
    """The widths of the blocks, as few and as equal as possible."""
    count = -(-columns // _RUN)
    width = -(-columns // (count * _RUN_MULTIPLE)) * _RUN_MULTIPLE
    return [min(width, columns - start) for start in range(0, columns, width)]


def _shrunk(moment: torch.Tensor, rows: int) -> torch.Tensor:
    """A second moment shrunk towards its own diagonal, the more the fewer tokens (`rows`) it is from.

    Without this, calibration on a few sentences is three times worse than no calibration. A multiple of the identity in
    the diagonal's place is as large as the few largest channels let it be, and hides the others.
    """
    known = rows / (rows + len(moment))
    return (known * moment + (1 - known) * torch.diag(moment.diagonal())).float()


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
