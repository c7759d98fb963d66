"""Static scales of a checkpoint's KV cache (`StaticCache`): the parameters that attention layers get for them.

An attention layer is a module with `take_static_scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch
from torch import nn

from llm.errors import CheckpointError, LLMError
from llm.quantization.base import KVCacheMethod, StaticCache
from llm.quantization.storage import POSITIVE, checked
from llm.quantization.unquantized import new_parameter

# In the order of the rows of `static_scales` (kernels/reference/attention.py).
_NAMES = ("k_scale", "k_offset", "v_scale", "v_offset")


class _Attention(Protocol):
    """An attention layer, as far as scales go."""

    num_kv_heads: int
    head_size: int

    def take_static_scales(self, dtype: torch.dtype, scales: torch.Tensor) -> None: ...


def prepare_static_cache(
    cache: StaticCache, model: nn.Module, stored: Callable[[str], str], has: Callable[[str], bool]
) -> dict[str, str]:
    """Give each attention layer that has scales its parameters.

    Returns: the checkpoint's name -> the parameter's, with the checkpoint's names of modules. stored: a module's name
    in the checkpoint. has: whether the checkpoint has a tensor.
    """
    names: dict[str, str] = {}
    for path, module in model.named_modules():
        if not hasattr(module, "take_static_scales"):
            continue
        parent, _, own = path.rpartition(".")
        below = {name: f"{stored(parent)}.{tensor}" for name, tensor in cache.tensors.items()}
        present = {name: tensor for name, tensor in below.items() if has(tensor)}
        if present:
            missing = [name for name in ("k_scale", "v_scale") if name not in present]
            if missing:
                raise CheckpointError(f"{cache.source} scales {path} without {below[missing[0]]}.")
            method = StaticCacheMethod(cache, tuple(present))
            method.create_weights(module)
            module.quant_method = method
            names |= {tensor: f"{stored(parent)}.{own}.{name}" for name, tensor in present.items()}
    return names


class StaticCacheMethod(KVCacheMethod):
    """Loads the static scales of one attention layer, which then belong to its backend."""

    invariant = True

    def __init__(self, cache: StaticCache, names: tuple[str, ...]) -> None:
        self.cache, self.names = cache, names
        self.scheme = f"KV cache {str(cache.dtype).removeprefix('torch.')}"
        self.source, self.reason = cache.source, "static scales"

    def create_weights(self, layer: nn.Module, *args: object, **kwargs: object) -> None:
        attention = cast(_Attention, layer)
        for name in self.names:
            values = torch.zeros(attention.num_kv_heads, attention.head_size)
            loader = checked(_load, POSITIVE) if name.endswith("scale") else _load
            layer.register_parameter(name, new_parameter(values, loader, any_dtype=True))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        attention, rows = cast(_Attention, layer), []
        for name in _NAMES:
            row = getattr(layer, name, None)
            rows.append(torch.zeros(attention.num_kv_heads, attention.head_size) if row is None else row.data)
            if name in self.names and name.endswith("offset") and not (rows[-1].abs() <= 128).all():
                raise CheckpointError(f"{name} of a KV cache must be of values from -128 to 127.")
        attention.take_static_scales(self.cache.dtype, torch.stack(rows).contiguous())


def stored_scale(name: str, values: torch.Tensor) -> torch.Tensor:
    """The tensor `name` of a checkpoint, one value or one for each KV head, from what the layer holds of it.

    Raises:
        LLMError: each channel has its own, which is ModelSlim's form.
    """
    if values.numel() == 0 or not has_cache_scales((name.rpartition(".")[2],)) or (values != values[:, :1]).any():
        raise LLMError(f"{name} scales channels of a KV cache, and no format that is written has a form for that.")
    return values[:1, 0] if (values == values[:1, :1]).all() else values[:, 0]


def has_cache_scales(names: Iterable[str]) -> bool:
    """Whether a module's tensors are those of compressed-tensors' `kv_cache_scheme`."""
    return any(name in ("k_scale", "v_scale") for name in names)


def _load(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
    """One value for all channels, one for each KV head, or one for each channel."""
    heads, size = param.shape
    if loaded.numel() not in (1, heads, heads * size):
        raise ValueError(f"has shape {list(loaded.shape)}, the model needs 1, {heads} or {heads * size} values")
    values = loaded.reshape(-1, size) if loaded.numel() == heads * size else loaded.reshape(-1, 1)
    param.data.copy_(values.float().expand(heads, size))
    return param.numel()
