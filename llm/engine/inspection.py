"""What a runner reports about its model: plain data for `explain`, reports, calibration and saving.

Owns all queries that need the model's modules or weights; no code outside the runner reads those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llm.config.defaults import library_defaults
from llm.engine.boundary import RunnerPlan
from llm.engine.cost import ModelCost, count_model
from llm.engine.expert_load import ExpertCounter
from llm.engine.observe import Captured, InputObserver, LayerCapture, layer_noise
from llm.engine.profile import ProfileRow, RunnerProfile
from llm.errors import LLMError
from llm.explain import Explanation, explain_runner
from llm.layers.moe import FusedMoE
from llm.loading.gguf.source import GgufSource
from llm.loading.weight_map import Target
from llm.platforms.interface import Platform
from llm.quantization.quantizer import decibels
from llm.quantization.storage.on_load import ActivationStatistics, QuantizeOnLoad
from llm.quantization.storage.requantized import Requantized


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        scheme: "" when it is not quantized.
        bytes_before, bytes_after: size of its weight, scales included.
        weight_snr: signal-to-noise ratio of the quantized weight in decibels; None: the original is not known.
        output_snr: the same of its outputs on the texts, given the unquantized layer's inputs.
        kind: "linear", "embedding", or "moe" for all experts of a layer.
    """

    name: str
    scheme: str
    bytes_before: int
    bytes_after: int
    weight_snr: float | None = None
    output_snr: float | None = None
    kind: str = "linear"


class ModelInspection:
    """The base class of `ModelRunner` with the queries about its model.

    Attributes:
        plan: what the model was built from.
        targets: the target of each checkpoint tensor; empty for random weights.
        offloaded: where the weights are, if a file has some of them; else "".
    """

    platform: Platform
    plan: RunnerPlan
    model: Any
    targets: Mapping[str, Target]
    offloaded: str
    _observer: InputObserver
    _capture: LayerCapture
    _counter: ExpertCounter
    _profile: RunnerProfile

    def describe(self) -> Explanation:
        """What computes the model's layers, and why."""
        return explain_runner(type(self), self.platform, self.model, self.plan.config, self.offloaded)

    def layer_reports(self) -> list[LayerReport]:
        """Every layer with a weight, in the model's order."""
        return _layer_reports(self.model, self.plan.config.model_config.weight_dtype)

    def save(self, path: str | Path, format: str) -> Path:
        """See `LLM.save_quantized`."""
        from llm.quantize.save import save_quantized

        if isinstance(self.plan.source, GgufSource):
            raise LLMError(f"{self.plan.source.path} is in GGUF already, and is not written in another format.")
        return save_quantized(self.model, self.targets, self.plan.source.folder, self.plan.hf_config, path, format)

    def cost(self) -> ModelCost:
        """What a step reads and computes."""
        return count_model(self.model, self.plan.config.cache_config.kv_cache_dtype, self.plan.kv_cache_specs)

    def start_profile(self) -> None:
        """Start timing every operation."""
        self._profile = RunnerProfile(self, self.plan.config.cache_config.kv_cache_dtype)

    def stop_profile(self) -> list[ProfileRow]:
        """The table of exclusive times since `start_profile`."""
        rows = self._profile.stop()
        del self._profile
        return rows

    def start_observing(self) -> None:
        """Start collecting statistics of each linear layer's inputs."""
        self._observer = InputObserver(self.model, self.platform.device)

    def stop_observing(self) -> dict[str, ActivationStatistics]:
        """Statistics of each linear layer's inputs since `start_observing`, by dotted path."""
        statistics = self._observer.stop()
        del self._observer
        return statistics

    def start_counting_experts(self) -> None:
        """From now on count the tokens of each expert."""
        self._counter = ExpertCounter(self.model)

    def stop_counting_experts(self) -> dict[str, list[int]]:
        """Tokens by expert since `start_counting_experts`, by the path of the layer; {}: there are no experts."""
        counts = self._counter.stop()
        del self._counter
        return counts

    def start_capturing(self, names: Sequence[str], limit_bytes: int) -> list[str]:
        """Start keeping inputs and outputs of linear layers, for `take_captured` after each step.

        Returns the captured layers: the first of `names` that together need at most `limit_bytes` per step.
        """
        tokens = self.plan.config.scheduler_config.max_num_batched_tokens
        self._capture = LayerCapture(self.model, names, tokens, limit_bytes)
        return self._capture.names

    def take_captured(self) -> Captured:
        """(input, output) of each captured layer since the last call."""
        return self._capture.take()

    def stop_capturing(self) -> None:
        self._capture.stop()
        del self._capture

    @library_defaults()
    def layer_noise(self, captured: Captured) -> dict[str, tuple[float, float]]:
        """Per layer: (sum of squares of the captured outputs, of this model's errors on the captured inputs)."""
        with self.platform.inference_mode():
            return layer_noise(self.model, captured)


def _layer_reports(model: Any, weight_dtype: torch.dtype) -> list[LayerReport]:
    """`weight_dtype` is that of the unquantized weights."""
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
