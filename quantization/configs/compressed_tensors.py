"""compressed-tensors: config.json's `quantization_config` -> a scheme per layer.

Owns reading the format's description (groups, targets, presets, formats) and refusing what is not supported.
`storage/compressed_tensors.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from llm.base.errors import CheckpointError, UnsupportedModelError
from llm.base.text import clip, list_names, show
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.configs.reader import Fields
from llm.quantization.matching import agreed, columns_of, matches
from llm.quantization.registry import get_scheme
from llm.quantization.storage.compressed_tensors import CompressedTensorsStorage
from llm.quantization.unquantized import left_alone

_SOURCE = "compressed-tensors"
_WHERE = f"{_SOURCE}: quantization_config"
_KEYS = frozenset(
    """quant_method format quantization_status config_groups ignore kv_cache_scheme global_compression_ratio
    transform_config sparsity_config version run_compressed""".split()
)
_GROUP_KEYS = frozenset("targets weights input_activations output_activations format".split())
_FORMATS = ("int-quantized", "pack-quantized", "naive-quantized")
# `quant_kind` -> class names that a target may use for it.
_CLASS_NAMES = {"linear": ("Linear",), "embedding": ("Embedding", "VocabParallelEmbedding")}
_LM_HEAD_NAMES = ("Linear", "ParallelLMHead")


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
        )


_INT8_TOKEN: dict[str, object] = {"num_bits": 8, "strategy": "token", "dynamic": True}
_INT8_PRESET: dict[str, object] = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": _INT8_TOKEN}


def _preset(name: str) -> dict[str, object]:
    """An integer preset of compressed_tensors.quantization.quant_scheme; groups of 128, except W8A8."""
    if name in ("W8A8", "INT8"):
        return dict(_INT8_PRESET)
    if name == "UNQUANTIZED":
        return {}
    integer = {f"W{bits}A{act}" for bits in range(2, 9) for act in (8, 16)} | {"W4A16_ASYM"}
    if name not in integer:
        raise UnsupportedModelError(
            f"{_SOURCE}: the preset {show(name)} is not computed; computed are {', '.join(sorted(integer))} and INT8."
        )
    weights = {"num_bits": int(name[1]), "group_size": 128, "strategy": "group", "symmetric": name != "W4A16_ASYM"}
    return {"weights": weights, "input_activations": _INT8_TOKEN if name.endswith("A8") else None}


@dataclass(frozen=True)
class Group:
    """One entry of `config_groups`.

    Attributes:
        scheme: the arithmetic; None: unquantized.
        format: how the tensors are stored.
    """

    name: str
    targets: tuple[str, ...]
    scheme: str | None
    format: str
    weights: QuantizationArgs | None
    inputs: QuantizationArgs | None

    def __str__(self) -> str:
        return f"{self.scheme} of {self.name}"

    def storage(self, columns: int, prefix: str) -> CompressedTensorsStorage:
        weights, inputs = self.weights or QuantizationArgs(), self.inputs
        size = weights.group_size if weights.strategy == "group" else None
        if size is not None and columns % size:
            raise UnsupportedModelError(f"{_SOURCE}: groups of {size} do not divide the {columns} columns of {prefix}.")
        return CompressedTensorsStorage(
            weights.num_bits,
            packed=self.format == "pack-quantized",
            group_size=size,
            per_tensor=weights.strategy == "tensor",
            symmetric=weights.symmetric,
            static_input=inputs is not None and not inputs.dynamic,
            symmetric_input=inputs is None or inputs.symmetric,
        )


class CompressedTensorsConfig(QuantizationConfig):
    """Integer weights with float or integer activations. Raises `UnsupportedModelError` for anything else."""

    def __init__(self, groups: list[Group], ignore: Sequence[str]) -> None:
        self.groups = groups
        self.ignore = ignore

    def get_name(self) -> str:
        return _SOURCE

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> CompressedTensorsConfig:
        whole = Fields(config, _WHERE)
        _refuse_whole(whole)
        default = whole.string("format", "") or "dense"
        given = whole.part("config_groups")
        if given is None or not given.given:
            raise whole.error("config_groups", "an object with one entry or more")
        groups = [_parse_group(given, name, default) for name in given.given]
        return cls(groups, whole.names("ignore"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in _CLASS_NAMES:
            return None
        is_table = kind == "embedding"
        untied_head = is_table and getattr(layer, "is_lm_head", False) and prefix == "lm_head"
        classes = _LM_HEAD_NAMES if untied_head else _CLASS_NAMES[kind]
        group = agreed(prefix, self.checkpoint_names(prefix), lambda name: self._find(name, prefix, classes))
        if group is None or group.scheme is None:
            return left_alone(kind, _SOURCE, "ignored, or no target of config_groups means it")
        scheme = get_scheme(group.scheme, kind)
        if scheme is None:
            raise UnsupportedModelError(
                f"{_SOURCE}: {prefix} is an embedding in {group.scheme}, which is not computed."
            )
        return scheme(group.storage(columns_of(layer), prefix), _SOURCE, f"config_groups.{group.name}, {group.format}")

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
    if config.given.get("kv_cache_scheme"):
        _refuse("a quantized KV cache (kv_cache_scheme) is not computed yet")
    transforms = config.part("transform_config")
    if transforms is not None and transforms.given.get("config_groups"):
        _refuse("rotations (transform_config) are not computed")
    sparsity = config.part("sparsity_config")
    if sparsity is not None and sparsity.string("format", "dense") != "dense":
        _refuse(f"sparse weights (sparsity_config format {show(sparsity.given['format'])}) are not computed")
    status = config.string("quantization_status", "") or "compressed"
    if status != "compressed":
        _refuse(f"quantization_status is {show(status)}: the weights were saved before they were compressed")


def _parse_group(groups: Fields, name: str, default_format: str) -> Group:
    raw = groups.given[name]
    if isinstance(raw, list):
        raw = {"targets": raw, **_preset(name.upper())}
    name = clip(name, 60)
    given = Fields(raw, f"{_WHERE}: config_groups.{name}", _GROUP_KEYS)
    targets = given.names("targets")
    if not targets:
        raise given.error("targets", "a list with one name or more")
    weights = QuantizationArgs.parse(given, "weights")
    inputs = QuantizationArgs.parse(given, "input_activations")
    if "output_activations" in given.given:
        _refuse(f"config_groups.{name} quantizes output activations, which is not computed")
    scheme = _scheme(name, weights, inputs)
    stored = given.string("format", "") or default_format
    if stored in ("mixed-precision", "dense"):
        stored = "int-quantized" if inputs is not None else "pack-quantized"
    if scheme is not None and stored not in _FORMATS:
        _refuse(f"config_groups.{name} has format {show(stored)}; read are {', '.join(_FORMATS)}")
    return Group(name, targets, scheme, stored, weights, inputs)


def _scheme(name: str, weights: QuantizationArgs | None, inputs: QuantizationArgs | None) -> str | None:
    """The scheme of a group (vLLM's _get_scheme_from_parts, for integers); None: unquantized."""
    if weights is None:
        return None
    _check_weights(name, weights)
    small = weights.num_bits <= 4
    if inputs is None:
        return "W4A16" if small else "W8A16"
    _check_inputs(name, inputs)
    if not weights.symmetric:
        _refuse(f"config_groups.{name} has asymmetric weights under quantized activations, which is not computed")
    if small and inputs.dynamic:
        return "W4A8_DYNAMIC"
    if weights.strategy == "group":
        _refuse(f"config_groups.{name} has {weights.num_bits}-bit weights in groups under quantized activations")
    return "W8A8_DYNAMIC" if inputs.dynamic else "W8A8"


def _check_weights(name: str, weights: QuantizationArgs) -> None:
    if weights.type != "int" or not 1 <= weights.num_bits <= 8:
        _refuse(
            f"config_groups.{name} has {weights.num_bits}-bit {weights.type} weights; computed are 1 to 8-bit int: use "
            "the unquantized checkpoint with quantization='w8a8' or 'w4a16'"
        )
    if weights.strategy not in ("tensor", "channel", "group"):
        _refuse(
            f"config_groups.{name} has weights of strategy {weights.strategy!r}; computed are tensor, channel, group"
        )
    if weights.actorder in ("group", "dynamic"):
        _refuse(
            f"config_groups.{name} has actorder {weights.actorder!r}: its groups are not runs of columns but scattered "
            "by weight_g_idx, so no kernel can walk them; quantize again with actorder 'weight' (or none)"
        )
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
    raise UnsupportedModelError(f"{_SOURCE}: {what}.")
