"""compressed-tensors: config.json's `quantization_config` -> a scheme per layer, and the tensors of its integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from llm.base.text import clip, list_names, show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.reference.rotation import check_block
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, StaticCache, WeightLoader
from llm.quantization.description import Fields, agreed, columns_of, matches
from llm.quantization.formats.floats import Float4Storage, Float8Storage
from llm.quantization.kv_cache import prepare_static_cache
from llm.quantization.packing import packed_words, unpack_from_int32
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import get_scheme
from llm.quantization.storage import (
    POSITIVE,
    Ready,
    WeightStorage,
    check_scales,
    expand_slots,
    group_loader,
    order_of_groups,
    stored_sizes,
    whole_offset,
)
from llm.quantization.unquantized import left_alone

SOURCE = "compressed-tensors"
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


# Keys of a group's weights and activations. Those that matter only while quantizing are accepted and not read.
_ARGS_KEYS = frozenset(
    """num_bits type symmetric group_size strategy block_structure dynamic actorder observer observer_kwargs scale_dtype
    zp_dtype""".split()
)


@dataclass(frozen=True)
class QuantizationArgs:
    """The fields of compressed_tensors.quantization.QuantizationArgs that loading needs; `dynamic` may be "local"."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str = "tensor"
    dynamic: bool | str = False
    actorder: str | None = None
    block: tuple[int, int] | None = None

    @classmethod
    def parse(cls, group: Fields, key: str) -> QuantizationArgs | None:
        given = group.part(key, _ARGS_KEYS)
        if given is None:
            return None
        size = given.optional_integer("group_size")
        strategy = clip(
            given.string("strategy", "tensor" if size is None else "channel" if size == -1 else "group"), 40
        )
        if strategy == "group" and (size is None or size < 1):
            raise CheckpointError(f"{given.where} has strategy 'group' and group_size {size}.")
        dynamic = given.given.get("dynamic", False)
        actorder = given.given.get("actorder")
        return cls(
            given.integer("num_bits", 8),
            clip(given.string("type", "int"), 40),
            given.boolean("symmetric", True),
            size,
            strategy,
            clip(dynamic, 40) if isinstance(dynamic, str) else given.boolean("dynamic", False),
            # The first releases of compressed-tensors wrote true for "group".
            "group" if actorder is True else None if actorder is False else given.optional_string("actorder"),
            _block(given) if strategy == "block" else None,
        )

    @property
    def kind(self) -> str:
        """A key of `_FORMATS`, or what there is none of."""
        return self.type if self.type == "int" else f"{self.type}{self.num_bits}"


def _block(given: Fields) -> tuple[int, int]:
    """[rows, columns], or "128x128"."""
    value = given.given.get("block_structure")
    parts = value.split("x") if isinstance(value, str) and len(value) < 40 else value
    if isinstance(parts, list) and len(parts) == 2:
        sizes = [
            int(item) if isinstance(item, int) or (isinstance(item, str) and item.isdecimal()) else 0 for item in parts
        ]
        if all(1 <= size < 1 << 20 for size in sizes):
            return sizes[0], sizes[1]
    raise given.error("block_structure", "the rows and columns of a block")


# --- Presets. ---

_FLOATS: dict[str, dict[str, object]] = {
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8_BLOCK": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "MXFP8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP8A16": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "MXFP4A16": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "NVFP4A16": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "W4AFP8": {"num_bits": 4, "group_size": 128, "strategy": "group"},
}
_INT8_TOKEN: dict[str, object] = {"num_bits": 8, "strategy": "token", "dynamic": True}
_INT8_PRESET: dict[str, object] = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": _INT8_TOKEN}


def preset(name: str) -> dict[str, object]:
    """A preset of compressed_tensors.quantization.quant_scheme; groups of integers are of 128.

    Activations of floats are left out: they are not quantized here.
    """
    if name in ("W8A8", "INT8"):
        return dict(_INT8_PRESET)
    if name == "UNQUANTIZED":
        return {}
    if name in _FLOATS:
        return {"weights": _FLOATS[name]}
    integer = {f"W{bits}A{act}" for bits in range(2, 9) for act in (8, 16)} | {"W4A16_ASYM"}
    if name not in integer:
        raise UnsupportedModelError(
            f"{SOURCE}: the preset {show(name)} is not computed; computed are "
            f"{', '.join(sorted(integer))}, INT8, {', '.join(_FLOATS)}."
        )
    weights = {"num_bits": int(name[1]), "group_size": 128, "strategy": "group", "symmetric": name != "W4A16_ASYM"}
    return {"weights": weights, "input_activations": _INT8_TOKEN if name.endswith("A8") else None}


class CompressedTensorsStorage(WeightStorage):
    """A weight as `compressed_tensors.compressors` write it.

    Tensors: `weight` int8 [N, K], or `weight_packed` int32 [N, ceil(K * bits / 32)] with `weight_shape`; `weight_scale`
    [1], [N, 1] or [N, G]; `weight_zero_point` when asymmetric, int8 of the scale's shape or packed along N; for static
    activations `input_scale` [1] and, when asymmetric, `input_zero_point` [1].

    Args:
        bits: of each value.
        packed: the format is pack-quantized.
        group_size: columns that share a scale; None: one scale per row.
        per_tensor: one scale per matrix; in a fused layer, one per shard.
        symmetric: there are no zero points.
        static_input: activations have a fixed scale.
        symmetric_input: the activations' fixed scale has no zero point.
        scattered: a group is not a run of columns; `weight_g_idx` [K] says the group of each.
    """

    def __init__(
        self,
        bits: int,
        *,
        packed: bool = False,
        group_size: int | None = None,
        per_tensor: bool = False,
        symmetric: bool = True,
        static_input: bool = False,
        symmetric_input: bool = True,
        scattered: bool = False,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.packed = packed
        self.group_size = group_size
        self.per_tensor = per_tensor
        self.symmetric = symmetric
        self.static_input = static_input
        self.symmetric_input = symmetric_input
        self.scattered = scattered
        self.rotation = 0  # of the weight, as `IntegerWeight` has it

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns = sizes, columns
        self._stored_sizes = stored_sizes(layer, sizes)
        self._rows_of_rank: Callable[[torch.Tensor, object], torch.Tensor] | None = getattr(layer, "rows_of_rank", None)
        self._shard_ids: tuple[Any, ...] = tuple(getattr(layer, "shard_ids", ()))
        rows, slots, groups = sum(sizes), len(sizes), columns // (self.group_size or columns)
        if self.packed:
            data = torch.empty(rows, packed_words(columns, self.bits), dtype=torch.int32)
            self.add(layer, "weight_packed", data, loader, output_dim=0, input_dim=1)
            self.add(layer, "weight_shape", torch.empty(slots, dtype=torch.int64), self._load_shape, any_dtype=True)
        else:
            data = torch.empty(rows, columns, dtype=torch.int8)
            self.add(layer, "weight", data, loader, output_dim=0, input_dim=1)
        shape = (slots,) if self.per_tensor else (rows, groups)
        attributes: dict[str, Any] = {"shard_slots": True} if self.per_tensor else {"output_dim": 0, "input_dim": 1}
        self.add(layer, "weight_scale", torch.empty(shape), loader, POSITIVE, **attributes)
        if not self.symmetric:
            zeros = torch.empty(shape, dtype=torch.int8)
            is_packed = self.packed and not self.per_tensor
            own = self._load_packed_zeros if is_packed else loader
            self.add(layer, "weight_zero_point", zeros, own, any_dtype=True, is_packed=is_packed, **attributes)
        if self.scattered:  # of each shard: those of a fused layer must be equal
            groups_of = torch.empty(slots, columns, dtype=torch.int32)
            self.add(layer, "weight_g_idx", groups_of, group_loader(columns, self._shard_ids), any_dtype=True)
        if self.static_input:
            self.add(layer, "input_scale", torch.empty(slots), loader, POSITIVE, shard_slots=True)
            if not self.symmetric_input:
                zero = torch.empty(slots, dtype=torch.int32)
                self.add(layer, "input_zero_point", zero, loader, shard_slots=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        rows = sum(self._sizes)
        if self.packed:
            q = unpack_from_int32(self.take(layer, "weight_packed"), self.bits, (rows, self._columns))
        else:
            q = self.take(layer, "weight")
            self._check_range(q)
        scale = self._per_row(self.take(layer, "weight_scale"))
        weight = IntegerWeight(q, scale, self.group_size or self._columns, self.bits, rotation=self.rotation)
        if not self.symmetric:
            weight.zero = self._per_row(self.take(layer, "weight_zero_point"))
        if self.scattered:
            order = order_of_groups(self.take(layer, "weight_g_idx"), weight.group_size, "weight_g_idx")
            if order is not None:
                weight.q = q[:, order]
                weight.columns = order.int()
        if self.static_input:
            self._read_input(layer, weight)
        return weight

    def _per_row(self, values: torch.Tensor) -> torch.Tensor:
        return expand_slots(values, self._sizes)[:, None] if self.per_tensor else values

    def _check_range(self, q: torch.Tensor) -> None:
        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if q.numel() and (q.min() < low or q.max() > high):
            raise CheckpointError(f"the weight has values outside of {self.bits} bits, [{low}, {high}].")

    def _read_input(self, layer: nn.Module, weight: IntegerWeight) -> None:
        """Shards of a fused layer have the same activations: take the union of their ranges."""
        scale = self.take(layer, "input_scale")
        if self.symmetric_input:
            weight.input_scale = float(scale.max())
            return
        zero = self.take(layer, "input_zero_point").float()
        if torch.equal(scale, scale[:1].expand_as(scale)) and torch.equal(zero, zero[:1].expand_as(zero)):
            weight.input_scale = float(scale[0])
            weight.input_offset = whole_offset(float(zero[0]), "input_zero_point")
            return
        low, high = float((scale * (-128 - zero)).min()), float((scale * (127 - zero)).max())
        joined = torch.tensor((high - low) / 255, dtype=torch.float32)
        check_scales(joined, "the range of input_scale and input_zero_point", POSITIVE)
        weight.input_scale = float(joined)
        weight.input_offset = whole_offset(round(-128 - low / weight.input_scale), "input_zero_point")

    def _load_shape(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        rows = self._stored_rows(shard_id)
        if loaded.tolist() != [rows, self._columns]:
            raise ValueError(f"says {loaded.tolist()}, the model needs {[rows, self._columns]}")
        return param.numel() if shard_id is None else 1

    def _load_packed_zeros(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        index = 0 if shard_id is None else self._shard_ids.index(shard_id)
        start = 0 if shard_id is None else sum(self._sizes[:index])
        rows = self._stored_rows(shard_id)
        expected = [packed_words(rows, self.bits), param.shape[1]]
        if list(loaded.shape) != expected or loaded.dtype != torch.int32:
            raise ValueError(f"is {loaded.dtype} {list(loaded.shape)}, the model needs int32 {expected}")
        zeros = unpack_from_int32(loaded, self.bits, (rows, param.shape[1]), dim=0)
        if self._rows_of_rank is not None:
            zeros = self._rows_of_rank(zeros, shard_id)
        param.data[start : start + len(zeros)] = zeros
        return zeros.numel()

    def _stored_rows(self, shard_id: Any) -> int:
        return sum(self._stored_sizes) if shard_id is None else self._stored_sizes[self._shard_ids.index(shard_id)]
