"""A model's vision tower: transformers' own modules, with our linear layers in them.

The whole model of transformers is built without weights, and its language model is taken out. What stays are the tower
and what joins it to the language model; `get_image_features` computes a picture's features, one picture at a time, so
that these depend on nothing else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from llm.base.construction import construction
from llm.base.text import show
from llm.base.types import JsonObject
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.kernels.select import backend_of_construction
from llm.models.transformers_backend.model import WeightNames
from llm.models.transformers_backend.skeleton import Theirs, check_counts, compute_buffers, refusing, without_warnings
from llm.models.vision import attention, modules
from llm.models.vision.inputs import KEPT, TOKENS
from llm.quantization.base import QuantizationConfig

# Where transformers' models have their language model, from the model or from its `model`.
_LANGUAGE = ("language_model", "text_model")
VIDEO_PIXELS = "pixel_values_videos"
# What positions are made of, by the names of a tower's inputs; the kinds of tokens.
_SIZES = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_IMAGE_TOKEN, _VIDEO_TOKEN = 1, 2


@dataclass(frozen=True)
class Features:
    """Of one picture.

    Attributes:
        rows: [tokens, hidden size], in the places of its tokens, of the type of activations.
        deep: further ones of the same shape, added to what enters the second layer and those after it (DeepStack).
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes * (1 + len(self.deep))


def known_tower(model_type: str) -> str | None:
    """The class of transformers for models of this type that read images; None: there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    return found if isinstance(found, str | None) else found[0]


def tower_has_axes(model_type: str) -> bool:
    """Whether tokens of models of this type have three positions."""
    import transformers

    name = known_tower(model_type)
    cls = None if name is None else getattr(transformers, name, None)
    own = vars(sys.modules[cls.__module__]) if cls is not None else {}
    return any(isinstance(item, type) and hasattr(item, "get_rope_index") for item in own.values())


class VisionTower(Patchable):
    """The parts of a model that are no language model.

    Args:
        raw: the decoded config.json.
        dtype: in which matrices are stored. It computes in the activations' type, and stores all else in it.
        quant_config: how the linear layers are quantized; None: they are not.

    Raises:
        UnsupportedModelError: transformers has no such model, or it has no `get_image_features`.
    """

    def __init__(
        self, raw: JsonObject, dtype: torch.dtype = torch.float32, quant_config: QuantizationConfig | None = None
    ) -> None:
        super().__init__()
        self._activations = construction().activations
        with torch.no_grad(), refusing(f"the vision tower of {raw.get('model_type')} cannot be built"):
            model = _skeleton(raw, self._activations)
            self.names = _TowerNames(model)
            self._language = _take_out_language_model(model)
            attention.use_in(model)
            compute_buffers(model)
            modules.put_ours_in(model, dtype, quant_config)
            _allocate(model)
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._theirs: tuple[Theirs] = (model,)  # its parts are registered above, under the names of the checkpoint
        backend = backend_of_construction()
        self._ops, self._device = backend.ops, backend.device

    def rename_weight(self, name: str) -> str:
        return self.names.rename(name)

    def merge_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], names: Iterable[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.names.merge(tensors, names)

    def ignores_weight(self, name: str) -> bool:
        """Those of the language model, and those that transformers leaves out."""
        return not self.has(name) or self.names.ignores(name)

    def has(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is one of these parts', and none of the language model and its head."""
        target = self.names.source(name)[0]
        others = (*self._language, "lm_head", "score")
        return not any(target == part or target.startswith(f"{part}.") for part in others)

    @property
    def token_id(self) -> int:
        config = self._theirs[0].config
        found = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if not isinstance(found, int):
            raise UnsupportedModelError("config.json names no token that stands for an image.")
        return found

    def features(self, inputs: Mapping[str, torch.Tensor]) -> Features:
        """Of one picture or video, of what its processor made."""
        name = "get_video_features" if VIDEO_PIXELS in inputs else "get_image_features"
        compute = getattr(_owner(self._theirs[0], name), name)
        takes = inspect.signature(compute).parameters
        given = {name: value.to(self._device) for name, value in inputs.items() if name in takes}
        given = {
            name: value.to(self._activations) if value.is_floating_point() else value for name, value in given.items()
        }
        with attention.computing(self._ops):
            found = compute(**given, **self._defaults(takes), return_dict=True)
        rows = self._rows_of(found, inputs.get(TOKENS), inputs.get(KEPT))
        deep = getattr(found, "deepstack_features", None) or ()
        return Features(rows.to(self._activations), tuple(_rows(part).to(self._activations) for part in deep))

    def _rows_of(self, found: Theirs, token_ids: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
        """kept: bool, which of the features have tokens; None: all."""
        model = self._theirs[0]
        pooled = getattr(found, "pooler_output", found)
        if pooled is None:  # Llama 4's, which it projects where its language model is called
            hidden = found.last_hidden_state
            return _rows(model.multi_modal_projector(hidden.reshape(-1, hidden.shape[-1])))
        rows = _rows(pooled)
        if kept is not None:
            return rows[kept.to(rows.device)]
        if token_ids is None:
            return rows
        indicators = (torch.tensor(model.config.visual_indicator_token_ids)[:, None] == token_ids).to(rows.device)
        is_indicator = indicators.any(0)
        features = rows.new_empty(len(token_ids), rows.shape[-1])
        features[~is_indicator] = rows
        features[is_indicator] = _rows(found.visual_indicator_features)[indicators[:, is_indicator].int().argmax(0)]
        return features

    def _defaults(self, takes: Collection[str]) -> dict[str, Theirs]:
        """Arguments that the models' forward takes from config.json where it is not given them."""
        config = self._theirs[0].config
        found: dict[str, Theirs] = {}
        for name in ("vision_feature_layer", "vision_feature_select_strategy"):
            if name in takes and hasattr(config, name):
                found[name] = getattr(config, name)
        return found

    @property
    def has_axes(self) -> bool:
        """Whether tokens have three positions."""
        return hasattr(_base(self._theirs[0]), "get_rope_index")

    def positions(
        self, token_ids: Sequence[int], pictures: Sequence[tuple[np.ndarray, Mapping[str, torch.Tensor]]]
    ) -> torch.Tensor:
        """The three positions of a prompt's tokens, int64 [3, N].

        Args:
            pictures: of each picture or video the places of its tokens and the sizes among its inputs.
        """
        base = _base(self._theirs[0])
        kinds = torch.zeros(1, len(token_ids), dtype=torch.int32)
        given: dict[str, Theirs] = {}
        for places, inputs in pictures:
            kinds[0, torch.from_numpy(places)] = _VIDEO_TOKEN if "video_grid_thw" in inputs else _IMAGE_TOKEN
            for name in _SIZES:
                if name in inputs:
                    given[name] = torch.cat([given[name], inputs[name]]) if name in given else inputs[name]
        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        found, _ = base.get_rope_index(ids, mm_token_type_ids=kinds, **given)
        positions: torch.Tensor = found[:, 0].long()
        return positions


def _skeleton(raw: JsonObject, dtype: torch.dtype) -> Theirs:
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

    family = str(raw.get("model_type"))
    if known_tower(family) is None:
        raise UnsupportedModelError(f"transformers has no model of model_type {show(family)} that reads images.")
    check_counts(dict(raw), "config.json")
    given = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "quantization_config")}
    config: Theirs = AutoConfig.for_model(family, **PreTrainedConfig._decode_special_floats(given))
    make = partial(AutoModelForImageTextToText.from_config, config, dtype=dtype, trust_remote_code=False)
    with torch.device("meta"), without_warnings():
        try:
            model: Theirs = make(attn_implementation="sdpa")
        except ValueError:  # it has none of PyTorch's fused attention
            model = make(attn_implementation="eager")
    model.eval().requires_grad_(False)
    if getattr(config.vision_config, "tokenize_function", "") == "gumbel_argmax":
        raise UnsupportedModelError("its vision tower draws features at random: tokenize_function is 'gumbel_argmax'.")
    if not hasattr(model, "get_image_features") and not hasattr(_base(model), "get_image_features"):
        raise UnsupportedModelError(f"{type(model).__name__} of transformers has no get_image_features.")
    return model


def _base(model: Theirs) -> Theirs:
    found = getattr(model, "model", None)
    return model if found is None else found


def _owner(model: Theirs, name: str) -> Theirs:
    base = _base(model)
    return base if hasattr(base, name) else model


def _take_out_language_model(model: Theirs) -> tuple[str, ...]:
    """The paths where it was."""
    found = []
    for path in (*(f"model.{name}" for name in _LANGUAGE), *_LANGUAGE):
        owner, _, name = path.rpartition(".")
        place = model.get_submodule(owner) if not owner or hasattr(model, owner) else None
        if isinstance(getattr(place, name, None), nn.Module):
            setattr(place, name, nn.Identity())
            found.append(path)
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} of transformers has no language model of its own.")
    if hasattr(model, "lm_head"):
        model.lm_head = nn.Identity()
    return tuple(found)


def _allocate(model: nn.Module) -> None:
    """What is transformers' own: layers of ours have their weights, or wait for them on the meta device."""
    for module in model.modules():
        if hasattr(module, "quant_method"):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                data = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(data, requires_grad=False)


def _rows(found: Theirs) -> torch.Tensor:
    parts = [found] if isinstance(found, torch.Tensor) else list(found)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


class _TowerNames(WeightNames):
    """Of the whole model: what is not the tower's is let through and ignored."""
