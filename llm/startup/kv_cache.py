"""The KV cache's type and its reason; refuses what has no quantized cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm.base.checks import refuse
from llm.config.engine import CACHE_DTYPES, EngineArgs
from llm.config.plan import resolve_dtype
from llm.forward import QUANTIZED_CACHE_DTYPES, KVCacheSpec, LatentCacheSpec, PagedSpec, StateSpec
from llm.layers.attention import attention_backend
from llm.platforms import Platform
from llm.quantization.base import QuantizationConfig


def choose_cache_dtype(
    args: EngineArgs, default: torch.dtype, config: QuantizationConfig | None
) -> tuple[torch.dtype, str]:
    """(dtype, reason). default: that of `dtype=`, or if that is "auto" of the weights; a checkpoint's static scales
    come before it."""
    static = None if config is None else config.static_cache
    auto = default if static is None or not static.is_default else static.dtype
    dtype, reason = resolve_dtype("kv_cache_dtype", args.kv_cache_dtype, auto, tuple(CACHE_DTYPES.values()))
    if static is not None and static.dtype == dtype:
        return dtype, f"{'' if reason == 'auto' else f'{reason}; '}static scales by {static.source}"
    if reason == "auto":
        unused = f"; kv_cache_dtype='fp8' uses the checkpoint's {static.source}" if static is not None else ""
        return dtype, ("the weights' type" if args.dtype == "auto" else f"dtype={args.dtype}") + unused
    if static is not None:
        reason += f"; the static scales of {static.source} are not used"
    return dtype, reason


def check_cache(
    given: object,
    dtype: torch.dtype,
    specs: Sequence[StateSpec],
    platform: Platform,
    config: QuantizationConfig | None = None,
) -> str:
    """What a quantized cache adds to its reason; "" of other types. Raises `ValidationError` if a state has none."""
    if dtype not in QUANTIZED_CACHE_DTYPES:
        return ""
    paged = [spec for spec in specs if isinstance(spec, PagedSpec)]
    floats = "a float type, such as 'bfloat16'"
    for spec in paged:
        if isinstance(spec, LatentCacheSpec) and spec.scales:
            continue
        if not isinstance(spec, KVCacheSpec):
            refuse("kv_cache_dtype", given, f"{floats}: this model keeps no keys and values of heads")
        backend = attention_backend(platform, spec.head_size)
        if not backend.reads_quantized:
            refuse("kv_cache_dtype", given, f"{floats}: {backend.__name__} reads nothing else")
    size = sum(spec.bytes_per_token() for spec in paged)
    static = None if config is None else config.static_cache
    heads = any(isinstance(spec, KVCacheSpec) for spec in paged)
    scales = "; a scale per token and KV head" if heads else "; a scale per token of each part of the latent vector"
    if static is not None and static.dtype == dtype:
        scales = ""
    # Of both types int8 alone is multiplied as integers, and of heads alone.
    widened = "" if heads and dtype == torch.int8 else "; widened to float32 to be read: it saves memory, not time"
    return f"{scales}; {size:,} bytes per token in all layers{widened}"
