"""The class that the registry gives for models on transformers' code, and what it reads from config.json.

config.json is read with transformers' own config classes: keys that these do not know are not read, as there. Code that
comes with a checkpoint and sizes that are no model's are refused before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from llm.base.text import clip, show
from llm.base.watch import Patchable
from llm.errors import CheckpointError, UnsupportedModelError
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
        self._base: tuple[nn.Module] = (base,)

    @property
    def base(self) -> nn.Module:
        """transformers' base model, which has the layers."""
        return self._base[0]

    @property
    def their_config(self) -> Theirs:
        """transformers' config of the language model."""
        return self._theirs[0].config.get_text_config(decoder=True)

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


class WeightNames:
    """Checkpoint name -> name in `model`, which is a skeleton with its own modules.

    transformers renames tensors of older releases while it loads them, and adds or removes the name of the base model
    where a checkpoint was saved from another class.
    """

    def __init__(self, model: Theirs) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model)
        self.converters = [item for item in mapping if isinstance(item, WeightConverter)]
        self._renamings: Theirs = [item for item in mapping if not isinstance(item, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._names = dict.fromkeys(model.state_dict(), True)
        self._model = model
        self._merged: set[str] = set()
        # Of our layers of experts: the parameters, which have their names already, and the paths of the layers, whose
        # stacked tensors of transformers are cut into these.
        self.own: frozenset[str] = frozenset()
        self.layers_of_experts: frozenset[str] = frozenset()
        self._left_out = [re.compile(pattern) for pattern in _left_out(model)]

    def rename(self, name: str) -> str:
        """The name of a tensor after `merge`."""
        return name if name in self._merged or name in self.own else self.source(name)[0]

    def merge(
        self, tensors: Iterator[tuple[str, torch.Tensor]], names: Iterable[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream with the tensors that transformers makes of several (the experts of a layer), or splits.

        Args:
            names: of all tensors of the checkpoint; a tensor is made once all that it needs have come.
        """
        from transformers.core_model_loading import dot_natural_key

        needed: dict[str, dict[str, str]] = {}
        stacked: dict[str, str] = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = self.source(name)
            if pattern is not None and target in self._names:
                needed.setdefault(target, {})[name] = pattern
            elif target.rpartition(".")[0] in self.layers_of_experts:
                stacked[name] = target
        targets = {name: target for target, sources in needed.items() for name in sources}
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            if name not in targets:
                yield stacked.get(name, name), tensor
                continue
            target = targets[name]
            found = waiting.setdefault(target, {})
            found[name] = tensor.clone()
            if len(found) == len(needed[target]):
                yield from self._converted(target, needed[target], waiting.pop(target))

    def _converted(
        self, target: str, patterns: Mapping[str, str], tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        found = next(item for item in self.converters if any(key in item.source_patterns for key in patterns.values()))
        converter: Theirs = deepcopy(found)
        for name, pattern in patterns.items():
            converter.add_tensor(target, name, pattern, tensors.pop(name))
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"tensors for {target} cannot be merged: {clip(str(error))}.") from error
        for name, tensor in made.items():
            self._merged.add(name)
            yield name, tensor[0] if isinstance(tensor, list) else tensor

    def source(self, name: str) -> tuple[str, str | None]:
        """(the model's name, the pattern of the converter that makes its tensor of several; None: there is none)."""
        from transformers.core_model_loading import rename_source_key

        own = {"base_model_prefix": self._prefix, "meta_state_dict": self._names}
        renamed, pattern = rename_source_key(name, self._renamings, self.converters, **own)
        if renamed not in self._names and name in self._names:
            renamed, pattern = rename_source_key(name, [], [], **own)
        return renamed, pattern

    def ignores(self, name: str) -> bool:
        """True for a tensor of a checkpoint that transformers leaves out as well."""
        return any(pattern.search(name) for pattern in self._left_out)


def _left_out(model: Theirs) -> list[str]:
    buffers = [name for name, _ in model.named_buffers()]
    found = list(model._keys_to_ignore_on_load_unexpected or ())
    # Buffers that older releases stored.
    for ending in ("rotary_emb.inv_freq", "position_ids", "attn.bias", "attn.masked_bias", "attention.bias"):
        if any(name.endswith(ending) for name in buffers) or "bias" in ending or "inv_freq" in ending:
            found.append(rf"(^|\.){re.escape(ending)}$")
    return found
