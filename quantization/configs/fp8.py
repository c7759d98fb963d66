"""`quant_method: fp8`, as DeepSeek, Qwen and Mistral publish 8-bit floats: which layers have them, and their scales.

Owns the choice per layer. GEMMs are of the weights alone: activations stay float32 whatever `activation_scheme` says,
as in vLLM on hardware without 8-bit floats, and scales of activations are not read. `storage/floats.py` reads the
tensors. Scales of a KV cache, if there are any, are used where the user asks for a cache of 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from llm.base.text import show
from llm.errors import CheckpointError, UnsupportedModelError
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, StaticCache
from llm.quantization.configs.reader import Fields
from llm.quantization.kv_cache import prepare_static_cache
from llm.quantization.matching import agreed
from llm.quantization.registry import get_scheme
from llm.quantization.storage.floats import Float8Storage
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
