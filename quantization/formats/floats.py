"""`quant_method: fp8` and `mxfp4`: weights of 8-bit and 4-bit floats, and their scales.

fp8 is how DeepSeek, Qwen and Mistral publish 8-bit floats. GEMMs are of the weights alone: activations stay float32
whatever `activation_scheme` says, as in vLLM on hardware without 8-bit floats, and scales of activations are not read.
Scales of a KV cache, if there are any, are used where the user asks for a cache of 8-bit floats. mxfp4 is how gpt-oss
publishes its experts: 4-bit floats with a power of two for each 32 columns; everything else is stored as it is.

`Float8Storage` and `Float4Storage` read codes and scales of a tensor, of rows, of groups of columns or of blocks for
other formats too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from llm.base.text import show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.weight import has_nan_codes
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, StaticCache, WeightLoader
from llm.quantization.description import Fields, agreed
from llm.quantization.kv_cache import prepare_static_cache
from llm.quantization.packing import doubled_fp4, unpack_fp4
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import get_scheme
from llm.quantization.storage import (
    NOT_NEGATIVE,
    POSITIVE,
    Ready,
    WeightStorage,
    check_scales,
    expand_slots,
    scale_values,
    stored_sizes,
)
from llm.quantization.unquantized import left_alone

_SOURCE = "fp8"
_WHERE = "fp8: quantization_config"
_KEYS = frozenset(
    """quant_method fmt activation_scheme weight_block_size ignored_layers modules_to_not_convert scale_fmt dequantize
    is_checkpoint_fp8_serialized""".split()
)
# transformers and DeepSeek use the first, vLLM's own tools the second. Both are multiplied by.
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALES_OF_ACTIVATIONS = ("input_scale", "activation_scale")


class Fp8Config(QuantizationConfig):
    """float8_e4m3fn in every linear layer but those that are named.

    Args:
        block: rows and columns that share a scale; None: one scale per matrix.
        ignored: names of modules that are stored as they were, or of modules that hold them.
    """

    def __init__(self, block: tuple[int, int] | None, ignored: tuple[str, ...]) -> None:
        self.block = block
        self.ignored = ignored
        self._names: frozenset[str] = frozenset()
        self._cache_names: dict[str, str] = {}

    def get_name(self) -> str:
        return "fp8"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Fp8Config:
        given = Fields(config, _WHERE, _KEYS)
        fmt = given.string("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedModelError(f"{_WHERE}: fmt is {show(fmt)}; 8-bit floats are computed as e4m3.")
        if given.string("activation_scheme", "dynamic") not in ("dynamic", "static"):
            raise given.error("activation_scheme", "'dynamic' or 'static'")
        if not given.boolean("is_checkpoint_fp8_serialized", True):
            raise CheckpointError(f"{_WHERE} says that the weights are not stored as 8-bit floats.")
        return cls(_block(given), given.names("ignored_layers") + given.names("modules_to_not_convert"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        if kind == "embedding" or agreed(prefix, self.checkpoint_names(prefix), self._ignores):
            return left_alone(kind, _SOURCE, "in modules_to_not_convert" if kind == "linear" else "an embedding")
        shared = "one scale per matrix" if self.block is None else "blocks of {}x{}".format(*self.block)
        storage = Float8Storage(self.block, _SCALES)
        return get_scheme("W8A16_FP8", kind)(storage, _SOURCE, f"float8_e4m3, {shared}, activations float32")

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._names = frozenset(shapes)
        if any(name.endswith(".self_attn.k_scale") for name in shapes):
            tensors = {"k_scale": "k_scale", "v_scale": "v_scale"}
            self.static_cache = StaticCache(torch.float8_e4m3fn, "k_scale and v_scale", tensors, is_default=False)

    def prepare_model(self, model: nn.Module) -> None:
        if self.static_cache is not None:
            self._cache_names = prepare_static_cache(
                self.static_cache, model, lambda path: self.checkpoint_names(path)[0], self._names.__contains__
            )

    def parameter_name(self, name: str) -> str:
        return self._cache_names.get(name, name)

    def ignores(self, name: str) -> bool:
        return name.rpartition(".")[2] in _SCALES_OF_ACTIVATIONS

    def _ignores(self, name: str) -> bool:
        """`name` itself is listed, or a module that holds it, or the end of its path."""
        return any(f".{name}.".startswith(f".{item}.") or f".{name}".endswith(f".{item}") for item in self.ignored)


def _block(given: Fields) -> tuple[int, int] | None:
    size = given.given.get("weight_block_size")
    if size is None:
        return None
    whole = isinstance(size, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in size)
    if not isinstance(size, list) or not whole or len(size) != 2 or not all(1 <= item < 1 << 20 for item in size):
        raise given.error("weight_block_size", "two positive numbers")
    return size[0], size[1]


# --- MXFP4. ---

_MXFP4 = "mxfp4"
_WHERE_MXFP4 = "mxfp4: quantization_config"
_EXPERTS = "experts"


class Mxfp4Config(QuantizationConfig):
    """Args:
    ignored: modules that are stored as they were, with `*` for a layer's number; experts are quantized unless they
        are named.
    """

    def __init__(self, ignored: tuple[str, ...]) -> None:
        self.ignored = ignored

    def get_name(self) -> str:
        return "mxfp4"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Mxfp4Config:
        given = Fields(config, _WHERE_MXFP4, frozenset(("quant_method", "modules_to_not_convert", "dequantize")))
        if given.boolean("dequantize", False):
            raise CheckpointError(f"{_WHERE_MXFP4} says that the weights were dequantized; remove it from config.json.")
        return cls(given.names("modules_to_not_convert"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        if kind == "embedding" or not agreed(prefix, self.checkpoint_names(prefix), self._quantizes):
            return left_alone(kind, _MXFP4, "not an expert")
        reason = "float4_e2m1 in groups of 32, activations float32"
        return get_scheme("W4A16", kind)(Float4Storage(torch.uint8), _MXFP4, reason)

    def _quantizes(self, name: str) -> bool:
        segments = name.split(".")
        return _EXPERTS in segments and not any(_holds(item.split("."), segments) for item in self.ignored)


def _holds(pattern: list[str], segments: list[str]) -> bool:
    """Whether the module that a pattern names is `segments` or holds it."""
    return len(pattern) <= len(segments) and all(
        wanted in ("*", found) for wanted, found in zip(pattern, segments, strict=False)
    )


_FP4_GROUPS = {torch.uint8: 32, torch.float8_e4m3fn: 16}


class Float8Storage(WeightStorage):
    """A weight of float8_e4m3fn, `weight` [N, K], that is multiplied by `weight_scale`.

    Args:
        block: rows and columns that share a scale; None: one scale per matrix, in a fused layer one per shard. 0
            columns: all of a row.
        scale_names: the names that a checkpoint may give the scales; each has one of them.
    """

    def __init__(self, block: tuple[int, int] | None, scale_names: tuple[str, ...] = ("weight_scale",)) -> None:
        super().__init__()
        self.block = block
        self.scale_names = scale_names

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns, self._loader = sizes, columns, loader
        self._shard_ids: tuple[object, ...] = tuple(getattr(layer, "shard_ids", ()))
        # Of the whole model: blocks are counted from a matrix's first row, whatever rows this rank has.
        self._stored_sizes = stored_sizes(layer, sizes)
        self._stored_columns: int = getattr(layer, "input_size", columns)
        rows = sum(sizes)
        data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        self.add(layer, "weight", data, self._load_codes, output_dim=0, input_dim=1)
        optional = len(self.scale_names) > 1
        for name in self.scale_names:
            if self.block is None:
                slots = torch.empty(len(sizes))
                self.add(layer, name, slots, loader, NOT_NEGATIVE, shard_slots=True, optional=optional)
                continue
            scale = torch.empty(rows, -(-columns // self.group_size))
            dims = {"output_dim": 0, "input_dim": 1, "optional": optional}
            self.add(layer, name, scale, self._load_scale, NOT_NEGATIVE, any_dtype=True, **dims)
        self._check_blocks(layer)

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return (self.block[1] if self.block else 0) or self._columns

    def read(self, layer: nn.Module) -> IntegerWeight:
        given = [name for name in self.scale_names if len(self.scale_names) == 1 or self.was_loaded(layer, name)]
        if len(given) != 1:
            raise CheckpointError(f"the weight needs one of the scales {' and '.join(self.scale_names)}, got {given}.")
        scale = self.take(layer, given[0])
        if self.block is None:
            scale = expand_slots(scale, self._sizes)[:, None]
        return IntegerWeight(self.take(layer, "weight"), scale.float(), self.group_size, 8)

    def _check_blocks(self, layer: nn.Module) -> None:
        """Refuse layers whose rows a block does not follow."""
        if self.block is None:
            return
        if self.block[0] > 1 and getattr(layer, "stored_by_key_head", False):
            raise UnsupportedModelError("scales of blocks do not follow rows that are stored by key head.")

    def _load_codes(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """Checked here and not where the layer is packed alone, so that the error names the checkpoint's tensor."""
        if loaded.dtype == param.dtype and has_nan_codes(loaded):
            raise ValueError("has values that are NaN")
        return self._loader(param, loaded, shard_id)

    def _load_scale(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """Scales of blocks become scales of rows."""
        height = self.block[0] if self.block else 1
        index = None if shard_id is None else self._shard_ids.index(shard_id)
        rows = sum(self._stored_sizes) if index is None else self._stored_sizes[index]
        groups = -(-self._stored_columns // (self.block[1] or self._stored_columns)) if self.block else 1
        expected = [-(-rows // height), groups]
        if loaded.dim() == 1 and groups == 1:
            loaded = loaded[:, None]
        if list(loaded.shape) != expected:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {expected}")
        scales = scale_values(loaded).repeat_interleave(height, dim=0)[:rows]
        return self._loader(param, scales, shard_id)


class Float4Storage(WeightStorage):
    """A weight of 4-bit floats (e2m1), two in a byte: `weight_packed` uint8 [N, K / 2], the even column's in the low
    nibble.

    `weight_scale` [N, K / group]. MXFP4 has powers of two for 32 columns, NVFP4 float8_e4m3fn for 16, divided by the
    matrix's `weight_global_scale`.

    Args:
        scale_dtype: torch.uint8 of MXFP4, torch.float8_e4m3fn of NVFP4.
        weight_name: another name of `weight_packed`.
    """

    def __init__(self, scale_dtype: torch.dtype, weight_name: str = "weight_packed") -> None:
        super().__init__()
        self.scale_dtype, self.weight_name = scale_dtype, weight_name
        self.group_size = _FP4_GROUPS[scale_dtype]

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        if columns % self.group_size:
            raise UnsupportedModelError(f"groups of {self.group_size} do not divide {columns} columns.")
        self._sizes = sizes
        rows, dims = sum(sizes), {"output_dim": 0, "input_dim": 1}
        self.add(layer, self.weight_name, torch.empty(rows, columns // 2, dtype=torch.uint8), loader, **dims)
        scale = torch.empty(rows, columns // self.group_size, dtype=self.scale_dtype)
        self.add(layer, "weight_scale", scale, loader, NOT_NEGATIVE, **dims)
        if self.scale_dtype != torch.uint8:
            divisor = torch.empty(len(sizes))
            self.add(layer, "weight_global_scale", divisor, loader, POSITIVE, shard_slots=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        codes = unpack_fp4(self.take(layer, self.weight_name))
        scale = scale_values(self.take(layer, "weight_scale"))
        if self.scale_dtype != torch.uint8:
            divisor = self.take(layer, "weight_global_scale")
            scale = scale / expand_slots(divisor, self._sizes)[:, None]
            check_scales(scale, "weight_scale divided by weight_global_scale", NOT_NEGATIVE)
        q = codes.to(torch.int8) - 8
        return IntegerWeight(q, scale / 2, self.group_size, 4, table=doubled_fp4())
