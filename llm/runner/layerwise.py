"""Statistics of layers' inputs with one unquantized layer in memory at a time.

Steps of `LayerwiseRunner` embed their tokens and are kept. Then `next_layer` reads a layer of the decoder, computes it
for all steps, and frees it. The sums are those of a whole model's: the steps are the same, and in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch

from llm.base.construction import PhaseTimes
from llm.base.library_settings import library_defaults, num_threads, serial_pytorch
from llm.config.engine import CacheConfig, EngineConfig
from llm.engine.boundary import Loaded, RunnerPlan
from llm.forward import ForwardBatch, StateSpec
from llm.loading.checkpoint import Checkpoint
from llm.loading.loader import load_weights
from llm.loading.weight_map import WeightMap
from llm.models.decoder import DecoderForCausalLM
from llm.quantization.on_load import ActivationStatistics
from llm.runner.inspection import InputObserver, linear_layers
from llm.runner.model_runner import ModelRunner, build_model

T = TypeVar("T")


class LayerwiseRunner(ModelRunner):
    """A runner whose steps end at the embedding: hidden states and logits are zeros.

    Attributes:
        why_whole: why the model's layers cannot be computed one after the other; then nothing else is valid.
        paths: of the linear layers in the decoder's layers.
        kept_bytes: what the steps keep until the last layer.
    """

    def _load(self, plan: RunnerPlan) -> Loaded:
        self.platform.set_device(plan.device_index)
        self.platform.import_kernels()
        # Steps, and copies of recurrent states between them.
        self._work: list[_Step | list[tuple[int, int]]] = []
        self.kept_bytes = self._computed = 0
        self.model = build_model(plan, self.platform)  # memory is taken when weights are read into it
        self._allocate(plan.config)
        self.why_whole = _why_whole(plan, self.model)
        if self.why_whole:
            return Loaded(seconds=PhaseTimes())
        self._layers = [f"model.layers.{index}" for index in range(len(self.model.model.layers))]
        before = [f"model.{name}" for name, _ in self.model.model.named_children() if name != "layers"]
        tensors = plan.source.tensors().tensors
        self._names = WeightMap(self.model).by_part(tensors, [*self._layers, *before])
        layers = zip(self._layers, self.model.model.layers, strict=True)
        self.paths = frozenset(f"{path}.{name}" for path, layer in layers for name, _ in linear_layers(layer))
        with serial_pytorch():
            for part in before:
                self._read_part(part)
        return Loaded(seconds=PhaseTimes())

    def next_layer(self) -> dict[str, ActivationStatistics]:
        """Statistics of the inputs of the next layer's linear layers, by dotted path.

        Raises:
            IndexError: that was the last.
        """
        path, layer = self._layers[self._computed], self.model.model.layers[self._computed]
        if not self._computed:
            self._free_all_but_layers()
        self._computed += 1
        with serial_pytorch():
            self._read_part(path)
        observer = InputObserver(layer, self.platform.device)
        with library_defaults(self.plan.config.num_threads or num_threads()), self.platform.inference_mode():
            for step in self._work:
                if isinstance(step, _Step):
                    step.hidden, step.residual = layer(step.hidden, step.residual, step.batch)
                else:
                    super()._copy_states(step)
        found = observer.stop()
        _free_parameters(layer)
        if self._computed == len(self._layers):
            self._work.clear()
            for tensor in (tensor for state in self.states for tensor in state):
                tensor.data = tensor.data.new_empty(0)
        self.platform.release_memory()
        return {f"{path}.{name}": statistics for name, statistics in found.items()}

    def close(self) -> None:
        super().close()
        self._work.clear()
        self.plan.source.close()

    # --- What becomes of a step. ---

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.model.embed_batch(batch)
        self._work.append(_Step(hidden, None, _kept(batch)))
        self.kept_bytes += 2 * hidden.nbytes  # with the residual
        return torch.zeros_like(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(len(hidden), self._vocab_size)

    def _copy_states(self, slots: Iterable[tuple[int, int]]) -> None:
        pairs = list(slots)
        if pairs:
            self._work.append(pairs)

    # --- Loading. ---

    def _read_part(self, part: str) -> None:
        source = self.plan.source.tensors()
        if not isinstance(source, Checkpoint):
            raise TypeError(f"{type(source).__name__} is no folder of safetensors")
        tensors = source.parts([self._names[part]])
        load_weights(self.model, tensors, show_progress=False, store_as=self.plan.store_as, part=part)

    def _free_all_but_layers(self) -> None:
        for name, module in self.model.model.named_children():
            if name != "layers":
                _free_parameters(module)
        self.platform.release_memory()

    def _allocate_states(self, specs: Sequence[StateSpec], cache: CacheConfig) -> list[tuple[torch.Tensor, ...]]:
        """Layers of a kind share one: each writes what it reads."""
        kinds = list(dict.fromkeys(specs))
        own = dict(zip(kinds, super()._allocate_states(kinds, cache), strict=True))
        return [own[spec] for spec in specs]

    def _may_record(self, config: EngineConfig) -> bool:
        return False


def _why_whole(plan: RunnerPlan, model: torch.nn.Module) -> str:
    if not isinstance(model, DecoderForCausalLM) or type(model).forward is not DecoderForCausalLM.forward:
        return "its layers do not run one after the other alone"
    if not plan.has_weights or plan.merge_lora is not None or not isinstance(plan.source.tensors(), Checkpoint):
        return "its weights are not as they are in a folder of safetensors"
    if hasattr(model, "merge_weights"):
        return "some of its weights are made of several tensors"
    if model.model.project_out is not None:
        return "a linear layer comes after the last of them"
    parts = [{id(each) for each in layer.parameters()} for layer in model.model.layers]
    if sum(map(len, parts)) > len(set().union(*parts)):
        return "they share weights"
    return ""


@dataclass
class _Step:
    """hidden, residual: what enters the next layer."""

    hidden: torch.Tensor
    residual: torch.Tensor | None
    batch: ForwardBatch


def _free_parameters(module: torch.nn.Module) -> None:
    """Buffers, as of rotary embeddings, are other layers' too."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _kept(batch: ForwardBatch) -> ForwardBatch:
    """With copies of what the next step overwrites."""
    copies = {id(each): _copied(each) for each in batch.metadata}
    return replace(_copied(batch), metadata=[copies[id(each)] for each in batch.metadata])


def _copied(value: T) -> T:
    """A dataclass with copies of its tensors and lists of numbers."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    own: dict[str, object] = {each.name: getattr(value, each.name) for each in fields(value)}
    tensors = {name: part.clone() for name, part in own.items() if isinstance(part, torch.Tensor)}
    lists = {name: list(part) for name, part in own.items() if isinstance(part, list) and name != "states"}
    return replace(value, **tensors, **lists)
