"""The class that the registry gives for models on transformers' code. Implements `llm.models.interface.CausalLM`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import ForwardBatch, StateSpec
from llm.layers.parallel import SINGLE, TensorParallel
from llm.models.config_reader import ConfigReader
from llm.models.interface import BuildOptions
from llm.models.transformers_backend.architecture import TransformersArchitecture, read_architecture
from llm.models.transformers_backend.experts import own_weights
from llm.models.transformers_backend.interface import attention_layers, use_paged_attention
from llm.models.transformers_backend.passes import Passes
from llm.models.transformers_backend.replace import replace_layers
from llm.models.transformers_backend.rows import RowCache
from llm.models.transformers_backend.skeleton import build_skeleton, refusing, without_warnings
from llm.models.transformers_backend.theirs import Theirs
from llm.models.transformers_backend.weights import WeightNames


class TransformersForCausalLM(Patchable):
    """transformers' modeling code with our layers: its children are those of transformers' model, under their names.

    Attributes:
        varies: why answers may depend on the batch; None: they do not.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    ignored_weights: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_config(cls, reader: ConfigReader) -> TransformersArchitecture:
        return read_architecture(reader)

    @classmethod
    def kv_cache_specs(
        cls, config: TransformersArchitecture, dtype: torch.dtype, tp: TensorParallel = SINGLE
    ) -> list[StateSpec]:
        return config.layout.states(dtype)

    def __init__(self, config: TransformersArchitecture, options: BuildOptions) -> None:
        super().__init__()
        layout = config.layout
        with refusing(f"{config.class_name} cannot be built"), without_warnings(), torch.no_grad():
            skeleton = build_skeleton(config.config)
            self.names = WeightNames(skeleton.model)
            self.transposed_weights, self.stacked_weights = replace_layers(skeleton, layout, options)
            model, base = skeleton.model, skeleton.base
        self.names.layers_of_experts, self.names.own = own_weights(model)
        self.varies = layout.varies
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._rows: RowCache | None = None
        if layout.rows:
            self._rows = RowCache(layout.rows, model.config, layout.way)
        else:
            layers = attention_layers(model, layout.calls)
            self.attention_layers = nn.ModuleList(layers)
            self._calls = use_paged_attention(model, layers)
        # Not submodules: their parts are registered above, under the names of the checkpoint.
        self._theirs: tuple[Theirs] = (model,)
        self._passes = Passes(model, base)

    def rename_weight(self, name: str) -> str:
        return self.names.rename(name)

    def merge_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], names: Iterable[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.names.merge(tensors, names)

    def ignores_weight(self, name: str) -> bool:
        return self.names.ignores(name)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._theirs[0].get_input_embeddings()(input_ids)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self._rows is not None:
            return self._rows.hidden(self._passes, batch)
        self._calls.start(batch)
        return self._passes.hidden(batch.input_ids, batch.positions, batch.inputs_embeds)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._passes.logits(hidden)
