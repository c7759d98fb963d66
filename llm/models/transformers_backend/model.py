"""The class that the registry gives for models on transformers' code, and what it reads from config.json.

config.json is read with transformers' own config classes: keys that these do not know are not read, as there. Code that
comes with a checkpoint and sizes that are no model's are refused before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from llm.base.text import clip, show
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, StateSpec
from llm.layers.parallel import SINGLE, TensorParallel
from llm.models.config_reader import ConfigReader
from llm.models.interface import BuildOptions
from llm.models.transformers_backend.attention import attention_layers, use_paged_attention
from llm.models.transformers_backend.probe import Layout, probe
from llm.models.transformers_backend.replace import own_weights, replace_layers
from llm.models.transformers_backend.rows import RowCache
from llm.models.transformers_backend.skeleton import (
    Passes,
    Theirs,
    build_skeleton,
    check_counts,
    refusing,
    without_warnings,
)
from llm.models.transformers_backend.weights import WeightNames


class TransformersForCausalLM(Patchable):
    """transformers' modeling code with our layers: its children are those of transformers' model, under their names.

    Implements `llm.models.interface.CausalLM`.

    Attributes:
        varies: why answers may depend on the batch; None: they do not.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    ignored_weights: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_config(cls, reader: ConfigReader) -> TransformersArchitecture:
        return _read_architecture(reader)

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
        if batch.images is not None:
            raise UnsupportedModelError("models that run on transformers' code read no images here.")
        self._calls.start(batch)
        return self._passes.hidden(batch.input_ids, batch.positions, batch.inputs_embeds)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._passes.logits(hidden)


_MOST = 2**40
# Where transformers' configs have the longest sequence. Without any the model has no such limit.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length")
_WITHOUT_LIMIT = 32768


@dataclass(frozen=True)
class TransformersArchitecture:
    """A causal language model of transformers.

    Attributes:
        config: its transformers config.
        class_name: its class in transformers.
    """

    config: Theirs
    class_name: str
    vocab_size: int
    max_position_embeddings: int

    @cached_property
    def layout(self) -> Layout:
        """What was found by trying the model without weights; raises `UnsupportedModelError` where it does not fit."""
        try:
            return probe(lambda: build_skeleton(self.config), self.max_position_embeddings)
        except UnsupportedModelError as reason:
            raise UnsupportedModelError(
                f"model_type {show(self.config.model_type)}: transformers' {self.class_name} does not fit this engine: "
                f"{clip(str(reason), 600)}."
            ) from reason


def known_to_transformers(model_type: str) -> str | None:
    """The class of transformers for causal language models of this type; None: there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return found if isinstance(found, str | None) else found[0]


def _read_architecture(reader: ConfigReader) -> TransformersArchitecture:
    """Raises `UnsupportedModelError` for what transformers cannot build, or may not."""
    from transformers import AutoConfig, PreTrainedConfig

    name = known_to_transformers(reader.family)
    if name is None:
        raise UnsupportedModelError(f"transformers has no causal language model of model_type {show(reader.family)}.")
    _refuse_code(reader, name)
    check_counts(dict(reader.raw), "config.json")
    raw = {key: value for key, value in reader.decoded.items() if key not in ("model_type", "auto_map")}
    with refusing("transformers cannot read config.json"), without_warnings():
        # transformers writes Infinity as {"__float__": "Infinity"}.
        config: Theirs = AutoConfig.for_model(reader.family, **PreTrainedConfig._decode_special_floats(raw))
        text = config.get_text_config(decoder=True)
    lengths = (getattr(text, key, None) for key in _LENGTHS)
    longest = next((value for value in lengths if isinstance(value, int) and value > 0), _WITHOUT_LIMIT)
    return TransformersArchitecture(
        config, name, _size("vocab_size", getattr(text, "vocab_size", None)), _size("the longest sequence", longest)
    )


def _refuse_code(reader: ConfigReader, name: str) -> None:
    """`auto_map` names classes in files beside the weights. Where transformers has the class by now, its own is run."""
    architectures, code = reader.names("architectures") or [], reader.nested("auto_map")
    theirs = code.get("AutoModelForCausalLM")
    if theirs is not None and str(theirs).rpartition(".")[2] != name:
        raise UnsupportedModelError(
            f"config.json: auto_map names the class {show(theirs)} in a file of the checkpoint, and code from a model "
            "folder is never run."
        )
    if architectures and name not in architectures:
        raise UnsupportedModelError(
            f"architectures {show(architectures)} of model_type {show(reader.family)} is not supported: only text "
            f"generation is offered, for which transformers has {name}."
        )


def _size(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise UnsupportedModelError(f"config.json: {name} is {show(value)}, must be an integer from 1 to {_MOST}.")
    return value
