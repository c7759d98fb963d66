"""compressed-tensors: config.json's `quantization_config` -> a scheme per layer.

Owns reading the format's description (groups, targets, presets, formats) and refusing what is not supported.
`storage/compressed_tensors.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from llm.base.text import clip, list_names, show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.reference.rotation import check_block
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, StaticCache
from llm.quantization.configs.compressed_args import SOURCE, QuantizationArgs, preset
from llm.quantization.configs.reader import Fields
from llm.quantization.formats.floats import Float4Storage, Float8Storage
from llm.quantization.kv_cache import prepare_static_cache
from llm.quantization.matching import agreed, columns_of, matches
from llm.quantization.registry import get_scheme
from llm.quantization.storage.base import WeightStorage
from llm.quantization.storage.compressed_tensors import CompressedTensorsStorage
from llm.quantization.unquantized import left_alone

_WHERE = f"{SOURCE}: quantization_config"
_KEYS = frozenset(
    """quant_method format quantization_status config_groups ignore kv_cache_scheme global_compression_ratio
    transform_config sparsity_config version run_compressed""".split()
)
_GROUP_KEYS = frozenset("targets weights input_activations output_activations format".split())
_TRANSFORM_KEYS = frozenset("type apply randomize requires_grad head_dim precision".split())
_APPLY_KEYS = frozenset("targets location inverse ignore".split())
# Where a rotation and its inverse cancel out; the matrix is symmetric, and so its own inverse.
_PLACES = ("input", "weight_input")
# How integers are stored, and floats of 8 and of 4 bits.
_FORMATS = {
    "int": ("int-quantized", "pack-quantized", "naive-quantized"),
    "float8": ("float-quantized", "naive-quantized", "mxfp8-quantized"),
    "float4": ("mxfp4-pack-quantized", "nvfp4-pack-quantized"),
}
# Of floats of 4 bits: format -> strategy, group size, and how the scales of groups are stored.
_FLOAT4 = {
    "mxfp4-pack-quantized": ("group", 32, torch.uint8),
    "nvfp4-pack-quantized": ("tensor_group", 16, torch.float8_e4m3fn),
}
_STRATEGIES = {
    "int": ("tensor", "channel", "group"),
    "float8": ("tensor", "channel", "group", "block"),
    "float4": ("group", "tensor_group"),
}
# What weights are multiplied with stays float32: the scales of float activations are not read.
_UNREAD_SCALES = ("input_scale", "input_global_scale", "input_zero_point")
# `quant_kind` -> class names that a target may use for it.
_CLASS_NAMES = {"linear": ("Linear",), "embedding": ("Embedding", "VocabParallelEmbedding")}
_LM_HEAD_NAMES = ("Linear", "ParallelLMHead")


@dataclass(frozen=True)
class Rotation:
    """One entry of `transform_config`: inputs and weights of its targets are rotated in blocks of columns.

    Attributes:
        block: 0: all columns of a layer.
    """

    name: str
    block: int
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def __str__(self) -> str:
        return f"the rotation {self.name}"

    def means(self, name: str, fused: str, classes: tuple[str, ...]) -> bool:
        left_out = any(_means(pattern, name, fused, classes) for pattern in self.ignore)
        return not left_out and any(_means(pattern, name, fused, classes) for pattern in self.targets)


@dataclass(frozen=True)
class Group:
    """One entry of `config_groups`.

    Attributes:
        scheme: the arithmetic; None: unquantized.
        format: how the tensors are stored.
        inputs: how activations are quantized; None: not at all.
        drops_inputs: the file quantizes them to floats, which is not done.
    """

    name: str
    targets: tuple[str, ...]
    scheme: str | None
    format: str
    weights: QuantizationArgs | None
    inputs: QuantizationArgs | None
    drops_inputs: bool = False

    def __str__(self) -> str:
        return f"{self.scheme} of {self.name}"

    def storage(self, columns: int, prefix: str) -> WeightStorage:
        weights, inputs = self.weights or QuantizationArgs(), self.inputs
        size = weights.group_size if weights.strategy in ("group", "tensor_group") else None
        if size is not None and columns % size:
            raise UnsupportedModelError(f"{SOURCE}: groups of {size} do not divide the {columns} columns of {prefix}.")
        if weights.kind == "float4":
            return Float4Storage(_FLOAT4[self.format][2])
        if weights.kind == "float8":
            blocks = {"tensor": None, "channel": (1, 0), "group": (1, size or 0), "block": weights.block}
            return Float8Storage(blocks[weights.strategy])
        return CompressedTensorsStorage(
            weights.num_bits,
            packed=self.format == "pack-quantized",
            group_size=size,
            per_tensor=weights.strategy == "tensor",
            symmetric=weights.symmetric,
            static_input=inputs is not None and not inputs.dynamic,
            symmetric_input=inputs is None or inputs.symmetric,
            scattered=weights.actorder in ("group", "dynamic"),
        )

    @property
    def reason(self) -> str:
        kind = {"float8": ", float8_e4m3", "float4": ", float4_e2m1"}.get(self.weights.kind if self.weights else "", "")
        return f"config_groups.{self.name}, {self.format}{kind}"


class CompressedTensorsConfig(QuantizationConfig):
    """Integer weights with float or integer activations, and float weights with float activations.

    GEMMs with float weights are of the weights alone: activations stay float32 where the file has them quantized to 8
    or 4 bits, as in vLLM on hardware without such floats. Raises `UnsupportedModelError` for anything else.
    """

    def __init__(
        self,
        groups: list[Group],
        ignore: Sequence[str],
        static_cache: StaticCache | None = None,
        rotations: Sequence[Rotation] = (),
    ) -> None:
        self.groups = groups
        self.rotations = rotations
        self.ignore = ignore
        self.static_cache = static_cache
        self._cache_names: dict[str, str] = {}

    def get_name(self) -> str:
        return SOURCE

    def has_four_bits(self) -> bool:
        return any(group.weights is not None and group.weights.num_bits <= 4 for group in self.groups)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> CompressedTensorsConfig:
        whole = Fields(config, _WHERE)
        _refuse_whole(whole)
        default = whole.string("format", "") or "dense"
        given = whole.part("config_groups")
        if given is None or not given.given:
            raise whole.error("config_groups", "an object with one entry or more")
        groups = [_parse_group(given, name, default) for name in given.given]
        return cls(groups, whole.names("ignore"), _static_cache(whole), _rotations(whole))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in _CLASS_NAMES:
            return None
        is_table = kind == "embedding"
        untied_head = is_table and getattr(layer, "is_lm_head", False) and prefix == "lm_head"
        classes = _LM_HEAD_NAMES if untied_head else _CLASS_NAMES[kind]
        group = agreed(prefix, self.checkpoint_names(prefix), lambda name: self._find(name, prefix, classes))
        if group is None or group.scheme is None:
            return left_alone(kind, SOURCE, "ignored, or no target of config_groups means it")
        scheme = get_scheme(group.scheme, kind)
        if scheme is None:
            raise UnsupportedModelError(f"{SOURCE}: {prefix} is an embedding in {group.scheme}, which is not computed.")
        storage, reason = group.storage(columns_of(layer), prefix), group.reason
        rotation = agreed(prefix, self.checkpoint_names(prefix), lambda name: self._rotation(name, prefix, classes))
        if rotation:
            if not isinstance(storage, CompressedTensorsStorage) or storage.static_input:
                _refuse(
                    f"{prefix} is rotated (transform_config); computed are rotated integers with dynamic activations"
                )
            storage.rotation = rotation.block or columns_of(layer)
            try:
                check_block(storage.rotation, columns_of(layer))
            except ValueError as error:
                raise UnsupportedModelError(f"{SOURCE}: {prefix}: {error}.") from error
            reason += f", rotated in blocks of {storage.rotation}"
        return scheme(storage, SOURCE, reason)

    def prepare_model(self, model: nn.Module) -> None:
        if self.static_cache is not None:
            self._cache_names = prepare_static_cache(self.static_cache, model, self._stored_name, lambda name: True)

    def _stored_name(self, path: str) -> str:
        (name,) = self.checkpoint_names(path)
        return name

    def parameter_name(self, name: str) -> str:
        return self._cache_names.get(name, name)

    def ignores(self, name: str) -> bool:
        if any(name.endswith(f".{item.name}_{place}.weight") for item in self.rotations for place in _PLACES):
            return True  # the matrix that the description names
        # Queries are not rounded by a scale of the file.
        if self.static_cache is not None and name.endswith(".q_scale"):
            return True
        return any(group.drops_inputs for group in self.groups) and name.rpartition(".")[2] in _UNREAD_SCALES

    def _rotation(self, name: str, fused: str, classes: tuple[str, ...]) -> Rotation | None:
        found = [item for item in self.rotations if item.means(name, fused, classes)]
        if len(found) > 1:
            _refuse(f"{name} is rotated by {list_names([item.name for item in found])} of transform_config")
        return found[0] if found else None

    def _find(self, name: str, fused: str, classes: tuple[str, ...]) -> Group | None:
        """The group of one shard: names before classes, as in vLLM's find_matched_target."""
        if any(_means(pattern, name, fused, classes) for pattern in self.ignore):
            return None
        by_name = [group for group in self.groups if any(_means(item, name, fused, ()) for item in group.targets)]
        by_class = [group for group in self.groups if any(item in classes for item in group.targets)]
        found = by_name or by_class
        return found[0] if found else None


def _means(pattern: str, name: str, fused: str, classes: tuple[str, ...]) -> bool:
    exact_or_regex = "*" not in pattern or pattern.startswith("re:")
    return pattern in classes or (exact_or_regex and (matches(name, pattern) or matches(fused, pattern)))


def _refuse_whole(config: Fields) -> None:
    unknown = sorted(key for key in config.given.keys() - _KEYS if config.given[key] not in ({}, []))
    if unknown:
        raise CheckpointError(f"{_WHERE} has keys that are not understood: {list_names(unknown)}.")
    sparsity = config.part("sparsity_config")
    if sparsity is not None and sparsity.string("format", "dense") != "dense":
        _refuse(f"sparse weights (sparsity_config format {show(sparsity.given['format'])}) are not computed")
    status = config.string("quantization_status", "") or "compressed"
    if status != "compressed":
        _refuse(f"quantization_status is {show(status)}: the weights were saved before they were compressed")


def _rotations(config: Fields) -> list[Rotation]:
    """Of `transform_config`: Hadamard matrices, inputs by one and weights by its inverse."""
    transforms = config.part("transform_config")
    groups = None if transforms is None else transforms.part("config_groups")
    found = []
    for name in () if groups is None else groups.given:
        where = f"{_WHERE}: transform_config.config_groups.{clip(name, 60)}"
        given = Fields(groups.given[name] if groups is not None else None, where, _TRANSFORM_KEYS)
        kind = given.string("type", "")
        if kind != "hadamard" or given.given.get("randomize"):
            _refuse(
                f"transform_config.{clip(name, 60)} is of type {show(kind)}; computed is 'hadamard', not randomized"
            )
        applied = given.given.get("apply")
        parts = [Fields(item, where, _APPLY_KEYS) for item in applied] if isinstance(applied, list) else []
        places = {part.string("location", ""): (part.names("targets"), part.names("ignore")) for part in parts}
        if set(places) != set(_PLACES) or len(set(places.values())) != 1 or len(parts) != len(_PLACES):
            _refuse(
                f"transform_config.{clip(name, 60)} is applied at {list_names(sorted(places)) or 'no place'}; computed "
                "is input and weight_input of the same layers"
            )
        targets, ignore = places["input"]
        found.append(Rotation(name, given.integer("head_dim", 0), targets, ignore))
    return found


def _static_cache(config: Fields) -> StaticCache | None:
    """Of `kv_cache_scheme`: scales of a whole layer, or of each KV head."""
    args = QuantizationArgs.parse(config, "kv_cache_scheme")
    if args is None:
        return None
    dtype = {("float", 8): torch.float8_e4m3fn, ("int", 8): torch.int8}.get((args.type, args.num_bits))
    if dtype is None or not args.symmetric or args.dynamic or args.strategy not in ("tensor", "attn_head"):
        kind = f"{'' if args.symmetric else 'asymmetric '}{args.num_bits}-bit {args.type}"
        kind = f"dynamic {kind}" if args.dynamic else kind
        _refuse(
            f"kv_cache_scheme is {kind} of strategy {args.strategy!r}; computed are static scales of 8 bits, one for "
            "each layer or KV head"
        )
    return StaticCache(dtype, "kv_cache_scheme", {"k_scale": "k_scale", "v_scale": "v_scale"})


def _parse_group(groups: Fields, name: str, default_format: str) -> Group:
    raw = groups.given[name]
    if isinstance(raw, list):
        raw = {"targets": raw, **preset(name.upper())}
    name = clip(name, 60)
    given = Fields(raw, f"{_WHERE}: config_groups.{name}", _GROUP_KEYS)
    targets = given.names("targets")
    if not targets:
        raise given.error("targets", "a list with one name or more")
    weights = QuantizationArgs.parse(given, "weights")
    inputs = QuantizationArgs.parse(given, "input_activations")
    if "output_activations" in given.given:
        _refuse(f"config_groups.{name} quantizes output activations, which is not computed")
    drops_inputs = inputs is not None and inputs.type == "float"
    if drops_inputs:
        inputs = None
    scheme = _scheme(name, weights, inputs)
    stored = given.string("format", "") or default_format
    if weights is None or scheme is None:
        return Group(name, targets, None, stored, weights, inputs)
    if stored in ("mixed-precision", "dense"):
        stored = _likely_format(weights, inputs)
    read = _FORMATS[weights.kind]
    if stored not in read:
        _refuse(f"config_groups.{name} has format {show(stored)}; read are {', '.join(read)} of {weights.type} weights")
    if weights.kind == "float4" and (weights.strategy, weights.group_size) != _FLOAT4[stored][:2]:
        _refuse(
            f"config_groups.{name} has {stored} with strategy {weights.strategy!r} in groups of {weights.group_size}"
        )
    return Group(name, targets, scheme, stored, weights, inputs, drops_inputs)


def _likely_format(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> str:
    """As compressed_tensors infers it of a group that does not say."""
    if weights.kind == "int":
        return "int-quantized" if inputs is not None else "pack-quantized"
    if weights.kind == "float8":
        return "float-quantized"
    return "mxfp4-pack-quantized" if weights.group_size == 32 else "nvfp4-pack-quantized"


def _scheme(name: str, weights: QuantizationArgs | None, inputs: QuantizationArgs | None) -> str | None:
    """The scheme of a group (vLLM's _get_scheme_from_parts); None: unquantized."""
    if weights is None:
        return None
    _check_weights(name, weights)
    small = weights.num_bits <= 4
    if inputs is None:
        return "W4A16" if small else "W8A16_FP8" if weights.kind == "float8" else "W8A16"
    _check_inputs(name, inputs)
    if weights.kind != "int":
        _refuse(f"config_groups.{name} has float weights under {inputs.num_bits}-bit {inputs.type} activations")
    if small and inputs.dynamic:
        return "W4A8_DYNAMIC"
    if not weights.symmetric:
        _refuse(f"config_groups.{name} has asymmetric weights under quantized activations, which is not computed")
    if weights.strategy == "group":
        _refuse(f"config_groups.{name} has {weights.num_bits}-bit weights in groups under quantized activations")
    return "W8A8_DYNAMIC" if inputs.dynamic else "W8A8"


def _check_weights(name: str, weights: QuantizationArgs) -> None:
    if weights.kind not in _STRATEGIES or not 1 <= weights.num_bits <= 8:
        _refuse(
            f"config_groups.{name} has {weights.num_bits}-bit {weights.type} weights; computed are 1 to 8-bit int, "
            "8-bit and 4-bit float: use the unquantized checkpoint with quantization='w8a8' or 'w4a16'"
        )
    computed = _STRATEGIES[weights.kind]
    if weights.strategy not in computed:
        _refuse(
            f"config_groups.{name} has weights of strategy {weights.strategy!r}; computed are {', '.join(computed)}"
        )
    if weights.kind != "int" and not weights.symmetric:
        _refuse(f"config_groups.{name} has float weights with zero points")
    if weights.actorder in ("group", "dynamic") and (weights.strategy != "group" or weights.kind != "int"):
        _refuse(f"config_groups.{name} has actorder {weights.actorder!r}, which is of integers in groups")
    if weights.dynamic:
        _refuse(f"config_groups.{name} has dynamic weights")


def _check_inputs(name: str, inputs: QuantizationArgs) -> None:
    if inputs.type != "int" or inputs.num_bits != 8:
        _refuse(f"config_groups.{name} has {inputs.num_bits}-bit {inputs.type} activations; computed are 8-bit int")
    dynamic = inputs.dynamic is True and inputs.strategy == "token" and inputs.symmetric
    static = inputs.dynamic is False and inputs.strategy == "tensor"
    if not dynamic and not static:
        _refuse(
            f"config_groups.{name} has activations of strategy {inputs.strategy!r}, dynamic={inputs.dynamic!r}, "
            f"symmetric={inputs.symmetric}; computed are symmetric per token (dynamic) and per tensor (static)"
        )


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(f"{SOURCE}: {what}.")
