"""ModelSlim (vllm-ascend's format): `quant_model_description.json` -> a scheme per layer.

The description file says the type of each tensor by name, and a few globals. Both versions of the format are read.
Types that are not supported are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from llm.base.text import clip, list_names, quote, show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.weight import dequantize
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, StaticCache, WeightLoader
from llm.quantization.description import Fields, agreed, columns_of
from llm.quantization.formats.floats import Float4Storage, Float8Storage
from llm.quantization.kv_cache import prepare_static_cache
from llm.quantization.packing import unpack_column_pairs, unpack_deq_scale, unpack_row_pairs
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import get_scheme, scheme_types
from llm.quantization.storage import (
    NOT_NEGATIVE,
    POSITIVE,
    Ready,
    WeightStorage,
    check_scales,
    checked,
    same_in_all_slots,
    whole_offset,
)
from llm.quantization.unquantized import left_alone, new_parameter

FILE = "quant_model_description.json"
FLOAT = "FLOAT"
PACKED_VERSION = "1.0.0"
_DEFAULT_GROUP_SIZE = 256
_GLOBALS = frozenset("model_quant_type version group_size metadata optional max_supported_tp".split())
_REFUSED_GLOBALS = {
    "fa_quant_type": "quantized attention",
    "indexer_quant_type": "a quantized indexer",
    "reduce_quant_type": "quantized communication",
    "is_rot_used": "rotated activations",
}
# Of int8 with a scale and an offset per channel.
_CACHE_TYPES = ("kv_cache_type", "kv_quant_type")
_CACHE = "C8"
_CACHE_TENSORS = {
    "k_scale": "k_proj.kv_cache_scale",
    "k_offset": "k_proj.kv_cache_offset",
    "v_scale": "v_proj.kv_cache_scale",
    "v_offset": "v_proj.kv_cache_offset",
}
_REFUSED_PARTS = {
    "heads_rotation": "rotations of heads",
    "kronecker_rotation": "Kronecker rotations",
    "div.mul_scale": "activations scaled by div.mul_scale (non-fused SmoothQuant)",
}
# Type -> the type with the same arithmetic. Floats: activations stay float32, as in the configs of other formats.
_FP8 = "W8A16_FP8"
_SAME = {
    "W8A8S": "W8A8",
    **dict.fromkeys(("WFP8AFP8_DYNAMIC", "W8A8FP8_DYNAMIC", "W8A8_MXFP8"), _FP8),
    **dict.fromkeys(("W4A8_MXFP", "W4A4_MXFP4", "W4A16_MXFP4"), "W4A16"),
}
_REASONS = {
    "W8A8SC": "its weights are compressed for the NPU",
}
_STATIC_PARTS = ("input_scale", "input_offset", "quant_bias", "deq_scale")


class ModelSlimConfig(QuantizationConfig):
    """The description of one checkpoint.

    Attributes:
        types: tensor name -> type.
        version: "1.0.0" packs int4 in pairs of rows.
        group_size: of W4A8's second-level scales; 0: per channel.
    """

    file_decides = True

    def __init__(self, description: Mapping[str, object]) -> None:
        fields = Fields({name: value for name, value in description.items() if "." not in name}, FILE)
        _check_globals(fields)
        self.version = fields.string("version", "")
        self.group_size = fields.integer("group_size", _DEFAULT_GROUP_SIZE)
        if self.group_size < 0:
            raise fields.error("group_size", "an integer of at least 0")
        self.types = _types(description)
        _check_tensors(self.types)
        is_cache = any(fields.given.get(name) for name in _CACHE_TYPES)
        self.static_cache = StaticCache(torch.int8, f"{FILE}: {_CACHE}", _CACHE_TENSORS) if is_cache else None
        self._cache_names: dict[str, str] = {}

    def get_name(self) -> str:
        return "ascend"

    def has_four_bits(self) -> bool:
        return any(kind.startswith("W4") for kind in self.types.values())

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelSlimConfig:
        return cls(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return [FILE, "quant_model_description_*.json"]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        names = self.checkpoint_names(prefix)
        if kind == "embedding" and not any(f"{name}.weight" in self.types for name in names):
            return None  # an embedding table that the description leaves out is unquantized
        quant_type = agreed(prefix, names, self._type)
        if quant_type is None:
            return left_alone(kind, FILE, "its weight is FLOAT")
        scheme = get_scheme(_SAME.get(quant_type, quant_type), kind)
        if scheme is None or quant_type in _REASONS:
            raise UnsupportedModelError(_not_computed(quant_type, kind, prefix))
        return scheme(self._storage(quant_type, names, layer), FILE, f"its weight is {clip(quant_type, 40)}")

    def prepare_model(self, model: nn.Module) -> None:
        """Register the bias that norms have in anti-outlier checkpoints: y = rmsnorm(x) * w + bias; static scales."""
        if self.static_cache is not None:
            self._cache_names = prepare_static_cache(
                self.static_cache, model, lambda path: self.checkpoint_names(path)[0], self.types.__contains__
            )
        for name, module in model.named_modules():
            is_norm = isinstance(getattr(module, "weight", None), nn.Parameter) and not hasattr(module, "quant_method")
            if is_norm and not hasattr(module, "bias"):
                (stored,) = self.checkpoint_names(name)
                if f"{stored}.bias" in self.types:
                    _give_bias(module)

    def parameter_name(self, name: str) -> str:
        return self._cache_names.get(name, name)

    def ignores(self, name: str) -> bool:
        """True for copies of norms in the format's first version, and for tensors of static W8A8 in W8A8_MIX layers."""
        path, _, last = name.rpartition(".")
        if path.endswith("norm.module"):
            return True
        kind = self.types.get(f"{path}.weight", "")
        if last == "weight_offset":  # of floats it is 0
            return _SAME.get(kind) == _FP8
        return last in _STATIC_PARTS and kind == "W8A8_MIX"

    def _type(self, name: str) -> str | None:
        found = self.types.get(f"{name}.weight")
        if found is None:
            raise CheckpointError(f"{FILE} says nothing of {name}.weight; the checkpoint is not complete.")
        return None if found == FLOAT else found

    def _storage(self, quant_type: str, names: list[str], layer: Any) -> WeightStorage:
        if quant_type in ("W8A8", "W8A8S"):
            return StaticInt8()
        scheme = _SAME.get(quant_type, "")
        if scheme == _FP8:
            return Float8Storage((1, 32 if quant_type == "W8A8_MXFP8" else 0))
        if scheme == "W4A16":
            return Float4Storage(torch.uint8, "weight")
        if quant_type == "W4A16":
            return WeightOnlyInt4(packed=self.version == PACKED_VERSION)
        if quant_type != "W4A8_DYNAMIC":
            return PerRowInt8()
        grouped = f"{names[0]}.weight_scale_second" in self.types
        size = self.group_size or _DEFAULT_GROUP_SIZE
        if grouped and columns_of(layer) % size:
            raise CheckpointError(f"groups of {size} do not divide the {columns_of(layer)} columns of {names[0]}.")
        return TwoLevelInt4(size if grouped else None, packed=self.version == PACKED_VERSION)


def _types(description: Mapping[str, object]) -> dict[str, str]:
    """Tensor name -> type."""
    types = {}
    for name, value in description.items():
        if "." in name:
            if not isinstance(value, str):
                raise CheckpointError(f"{FILE} gives {quote(name)} the type {show(value)}, must be a string.")
            types[name] = value
    return types


def _check_globals(fields: Fields) -> None:
    for name, what in _REFUSED_GLOBALS.items():
        if fields.given.get(name):
            raise UnsupportedModelError(f"{FILE} has {name}={show(fields.given[name])}: {what} is not computed.")
    for name in _CACHE_TYPES:
        if fields.given.get(name) not in (None, "", _CACHE):
            raise UnsupportedModelError(f"{FILE} has {name}={show(fields.given[name])}; computed is {_CACHE!r}.")
    unknown = sorted(fields.given.keys() - _GLOBALS - set(_REFUSED_GLOBALS) - set(_CACHE_TYPES))
    if unknown:
        raise CheckpointError(f"{FILE} has keys that are not understood: {list_names(unknown)}.")


def _check_tensors(types: Mapping[str, str]) -> None:
    for name, value in types.items():
        for part, what in _REFUSED_PARTS.items():
            if part in name:
                raise UnsupportedModelError(f"{FILE} names {quote(name)}: {what} are not computed.")
        module, _, last = name.rpartition(".")
        if last in ("kv_cache_scale", "kv_cache_offset"):
            if value != _CACHE:
                raise UnsupportedModelError(
                    f"{FILE} gives {clip(name)} the type {show(value)}; computed is {_CACHE!r}."
                )
            continue
        whole = types.get(f"{module}.weight", value)
        if last not in ("bias", "module") and value != whole:
            raise CheckpointError(
                f"{FILE} gives {clip(name)} the type {show(value)} and its weight {show(whole)}; they must agree."
            )


def _not_computed(quant_type: str, kind: str, prefix: str) -> str:
    why = f" ({_REASONS[quant_type]})" if quant_type in _REASONS else ""
    known = [scheme for scheme in scheme_types(kind) if scheme not in _REASONS and scheme != _FP8]
    floats = [name for name, scheme in _SAME.items() if kind == "linear" and scheme != "W8A8"]
    return (
        f"{prefix} is stored as {clip(quant_type, 40)}{why}, which is not computed for {kind} layers; computed are "
        f"{', '.join(known + floats)}. Use another quantization of this model, or its original float weights."
    )


def _give_bias(norm: Any) -> None:
    """Add a bias to the norm's result with a hook, whatever kernel computes the norm.

    Called with a residual, a norm returns (normed, sum): the bias is added to the first.
    """
    norm.bias = new_parameter(torch.zeros_like(norm.weight.data, dtype=torch.float32), _copy, output_dim=0)

    def add(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + module.bias, *output[1:])
        return output + module.bias

    norm.register_forward_hook(add)


def _copy(param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
    if param.shape != loaded.shape:
        raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(param.shape)}")
    param.data.copy_(loaded)
    return loaded.numel()


# --- The layouts. ---

# Relative tolerance for scales that were rounded to float16 (11 bits), with room for the rounding of their product.
_SCALE_TOLERANCE = 4e-3
_SCALE_BIAS_TOLERANCE = 1e-3


class _RowStorage(WeightStorage):
    """Common base of the layouts: adds row-wise parameters."""

    def _add_rows(
        self, layer: nn.Module, name: str, data: torch.Tensor, loader: WeightLoader, scales: str = "", /, **more: Any
    ) -> None:
        self.add(layer, name, data, loader, scales, output_dim=0, **more)

    def _offsets(self, layer: nn.Module, name: str) -> torch.Tensor | None:
        """Zero points; None if they are absent or all 0."""
        values = self.take(layer, name)
        if not self.was_loaded(layer, name) or not values.any():
            return None
        if not torch.equal(values, values.round()):
            raise CheckpointError(f"{name} has values that are not whole.")
        return values


class PerRowInt8(_RowStorage):
    """W8A8_DYNAMIC, W8A8_MIX and W8A16: `weight` int8 [N, K], `weight_scale` and `weight_offset` [N, 1]."""

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows = sum(sizes)
        self._columns = columns
        self._add_rows(layer, "weight", torch.empty(rows, columns, dtype=torch.int8), loader, input_dim=1)
        self._add_rows(layer, "weight_scale", torch.empty(rows, 1), loader, POSITIVE)
        self._add_rows(layer, "weight_offset", torch.zeros(rows, 1), loader, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        scale = self.take(layer, "weight_scale")
        q = self.take(layer, "weight")
        return IntegerWeight(q, scale, self._columns, 8, zero=self._offsets(layer, "weight_offset"))


class StaticInt8(_RowStorage):
    """W8A8: one activation scale and offset; y = (sum_k xq w + quant_bias) * deq_scale.

    deq_scale = input_scale * weight_scale; quant_bias = bias / deq_scale - input_offset * sum_k w, rounded: it includes
    the layer's bias. Activations are round(x / scale) + offset; vllm-ascend rounds x * (1 / scale) + offset, which
    differs only for values next to the border between two integers.

    Tensors: `weight` int8 [N, K], `input_scale`, `input_offset` [1], `quant_bias` int32 [N], `deq_scale` [N] as float32
    or as int64 with its bits, `weight_scale`, `weight_offset` [N, 1].
    """

    holds_bias = True

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows, slots = sum(sizes), len(sizes)
        self._columns = columns
        self._add_rows(layer, "weight", torch.empty(rows, columns, dtype=torch.int8), loader, input_dim=1)
        self.add(layer, "input_scale", torch.empty(slots), loader, POSITIVE, shard_slots=True)
        self.add(layer, "input_offset", torch.empty(slots), loader, shard_slots=True, any_dtype=True)
        self._add_rows(layer, "quant_bias", torch.zeros(rows, dtype=torch.int32), loader, optional=True)
        bits = converted(checked(loader, POSITIVE), unpack_deq_scale)
        self._add_rows(layer, "deq_scale", torch.empty(rows), bits, optional=True, any_dtype=True)
        self._add_rows(layer, "weight_scale", torch.empty(rows, 1), loader, POSITIVE, optional=True)
        self._add_rows(layer, "weight_offset", torch.zeros(rows, 1), loader, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        input_scale = same_in_all_slots(self.take(layer, "input_scale"), "input_scale")
        offset = whole_offset(same_in_all_slots(self.take(layer, "input_offset"), "input_offset"), "input_offset")
        if self._offsets(layer, "weight_offset") is not None:
            raise CheckpointError("weight_offset is not 0; W8A8 computes symmetric weights.")
        q, scale = self.take(layer, "weight"), self._output_scale(layer, input_scale)
        by_row = (scale / input_scale).float()[:, None]
        check_scales(by_row, "deq_scale divided by input_scale", POSITIVE)
        weight = IntegerWeight(q, by_row, self._columns, 8)
        weight.input_scale, weight.input_offset = input_scale, offset
        if self.was_loaded(layer, "quant_bias"):
            # The kernel subtracts offset * sum_k w itself: add it back to get the float bias.
            sums = q.sum(dim=1, dtype=torch.int64)
            weight.bias = ((self.take(layer, "quant_bias").long() + offset * sums).double() * scale).float()
        elif getattr(layer, "bias", None) is not None and not getattr(layer.bias, "elements_loaded", 0):
            raise CheckpointError("neither quant_bias nor bias is in the checkpoint, and the layer has one.")
        return weight

    def _output_scale(self, layer: nn.Module, input_scale: float) -> torch.Tensor:
        """deq_scale in float64, from the checkpoint or from its factors; if it has both, they must agree."""
        by_factors = None
        if self.was_loaded(layer, "weight_scale"):
            by_factors = self.take(layer, "weight_scale")[:, 0].double() * input_scale
        if not self.was_loaded(layer, "deq_scale"):
            if by_factors is None:
                raise CheckpointError("neither deq_scale nor weight_scale is in the checkpoint.")
            return by_factors
        scale = self.take(layer, "deq_scale").double()
        if by_factors is not None and not torch.allclose(scale, by_factors, rtol=_SCALE_TOLERANCE, atol=0):
            raise CheckpointError("deq_scale is not input_scale * weight_scale.")
        return scale


class TwoLevelInt4(_RowStorage):
    """W4A8_DYNAMIC: w = q4 * weight_scale_second[n, g] * weight_scale[n]; per channel without second-level scales.

    Args:
        group_size: of the second-level scales; None: per channel.
        packed: version 1.0.0, `weight` int8 [N / 2, K] with two rows in a byte; else int8 [N, K], one value per byte.

    `scale_bias` ([N, 1] or [N, 16], packed only) is 8 * sum_k w for an NPU kernel; here it verifies the loaded weight.
    """

    def __init__(self, group_size: int | None, packed: bool) -> None:
        super().__init__()
        self.group_size = group_size
        self.packed = packed

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows = sum(sizes)
        self._columns = columns
        if self.packed and any(size % 2 for size in sizes):
            raise CheckpointError(f"int4 weights in row pairs need an even number of rows, got {sizes}.")
        stored = rows // 2 if self.packed else rows
        pairs: dict[str, Any] = {"packed_dim": 0, "packed_factor": 2} if self.packed else {}
        data = torch.empty(stored, columns, dtype=torch.int8)
        self._add_rows(layer, "weight", data, loader, input_dim=1, **pairs)
        self._add_rows(layer, "weight_scale", torch.empty(rows, 1), loader, POSITIVE)
        self._add_rows(layer, "weight_offset", torch.zeros(rows, 1), loader, optional=True, any_dtype=True)
        if self.packed:
            total = converted(loader, _row_sums)
            self._add_rows(layer, "scale_bias", torch.empty(rows), total, optional=True, any_dtype=True)
        if self.group_size is not None:
            shape = (rows, columns // self.group_size)
            zeros = torch.zeros(shape)
            self._add_rows(layer, "weight_scale_second", torch.empty(shape), loader, POSITIVE, input_dim=1)
            self._add_rows(layer, "weight_offset_second", zeros, loader, input_dim=1, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        stored = self.take(layer, "weight")
        q = unpack_row_pairs(stored) if self.packed else stored
        scale = self.take(layer, "weight_scale")
        offsets = ["weight_offset"]
        if self.group_size is not None:
            second = self.take(layer, "weight_scale_second")
            scale = scale * second
            check_scales(scale, "weight_scale times weight_scale_second", NOT_NEGATIVE)
            offsets.append("weight_offset_second")
        for name in offsets:
            if self._offsets(layer, name) is not None:
                raise CheckpointError(f"{name} is not 0; W4A8 computes symmetric weights.")
        weight = IntegerWeight(q, scale, self.group_size or self._columns, 4)
        if self.packed and self.was_loaded(layer, "scale_bias"):
            self._check_scale_bias(self.take(layer, "scale_bias"), weight)
        return weight

    def _check_scale_bias(self, scale_bias: torch.Tensor, weight: IntegerWeight) -> None:
        values = dequantize(weight.q, weight.scale, None, weight.group_size).double()
        allowed = _SCALE_BIAS_TOLERANCE * 8 * values.abs().sum(dim=1)
        wrong = ~((scale_bias.double() - 8 * values.sum(dim=1)).abs() <= allowed)  # NaN is wrong
        if wrong.any():
            raise CheckpointError(
                f"scale_bias is not 8 times the sum of the weights in {int(wrong.sum())} of {len(wrong)} rows; the "
                "weights were packed or scaled in another way than the description says."
            )


_UNIT = 8  # groups are multiples of so many columns


class WeightOnlyInt4(_RowStorage):
    """W4A16: w = (q4 - weight_offset[n, g]) * weight_scale[n, g], in groups or one per row.

    Args:
        packed: version 1.0.0, `weight` int8 [N / 2, K] in row pairs, or [N, K / 2] in column pairs where there is one
            scale per row; else int8 [N, K], one value per byte.

    Tensors: `weight`; `weight_scale`, `weight_offset` [N, G], whose G alone says the size of the groups.
    """

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self._packed = packed

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows = sum(sizes)
        self._columns, self._step = columns, columns // _UNIT
        whole: int = layer.input_size  # type: ignore[assignment]  # of all ranks
        if columns % _UNIT:
            raise CheckpointError(f"W4A16 needs a multiple of {_UNIT} columns, got {columns}.")
        data = torch.empty(rows, columns, dtype=torch.int8)
        self._add_rows(layer, "weight", data, converted(loader, lambda t: self._unpacked(t, whole)), input_dim=1)
        by_unit = converted(loader, lambda t: self._by_unit(t, whole))
        units = (rows, columns // _UNIT)
        self._add_rows(layer, "weight_scale", torch.empty(units), checked(by_unit, POSITIVE), input_dim=1)
        zeros = torch.zeros(units)
        self._add_rows(layer, "weight_offset", zeros, by_unit, input_dim=1, optional=True, any_dtype=True)

    def _unpacked(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        if stored.dim() != 2:
            raise ValueError(f"has shape {list(stored.shape)}, must have two dimensions")
        if not self._packed:
            if stored.numel() and (stored.amin() < -8 or stored.amax() > 7):
                raise ValueError(f"has values from {int(stored.amin())} to {int(stored.amax())}, must be of 4 bits")
            return stored
        return unpack_row_pairs(stored) if stored.shape[1] == columns else unpack_column_pairs(stored)

    def _by_unit(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        """One value per group -> one per unit: shards of a fused layer may have groups of their own."""
        groups = stored.shape[1] if stored.dim() == 2 else 0
        if not groups or columns // _UNIT % groups:
            shape = list(stored.shape)
            raise ValueError(f"has shape {shape}; groups must be multiples of {_UNIT} of {columns} columns")
        self._step = math.gcd(self._step, columns // _UNIT // groups)
        return stored.float().repeat_interleave(columns // _UNIT // groups, 1)

    def read(self, layer: nn.Module) -> IntegerWeight:
        scale, zero = self.take(layer, "weight_scale"), self._offsets(layer, "weight_offset")
        if zero is not None and (zero.amin() < -8 or zero.amax() > 7):
            raise CheckpointError(
                f"weight_offset has values from {zero.amin():g} to {zero.amax():g}, must be of 4 bits."
            )
        scale = scale[:, :: self._step].contiguous()
        zero = None if zero is None else zero[:, :: self._step].contiguous()
        return IntegerWeight(self.take(layer, "weight"), scale, self._step * _UNIT, 4, zero=zero)


def _row_sums(partial: torch.Tensor) -> torch.Tensor:
    if partial.dim() != 2:
        raise ValueError(f"has shape {list(partial.shape)}, must have two dimensions")
    return partial.double().sum(dim=1).float()


def converted(loader: WeightLoader, convert: Callable[[torch.Tensor], torch.Tensor]) -> WeightLoader:
    """`loader`, called with `convert(loaded)`."""

    def load(param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        return loader(param, convert(loaded), shard_id)

    return load
