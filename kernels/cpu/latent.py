"""Latent attention in C++; `kernels/reference/latent.py` defines it, latent.cpp and attention.cpp compute it."""

from __future__ import annotations

import torch

from llm.forward import QUANTIZED_CACHE_DTYPES, SCALE_BYTES, AttentionMetadata
from llm.kernels.cpu.attention import CACHE_KINDS, no_such_slot, out_of_range, plan_of
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import KINDS, as_float32

_HEADS_LINEAR = KERNELS["llm_heads_linear"]
_WRITE = KERNELS["llm_write_latent_cache"]
_ATTENTION = KERNELS["llm_latent_attention"]


def heads_linear(library: Library, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[t, h] = x[t, h] W_h: x float32 [N, heads, k], weight float [heads, k, n] -> float32 [N, heads, n].

    Each output is one chain of FMAs over k = 0 ... K-1.
    """
    tokens, heads, k = x.shape
    if x.dtype != torch.float32 or weight.shape[:2] != (heads, k) or not weight.is_contiguous():
        raise ValueError(f"x {x.dtype} {list(x.shape)} does not fit a contiguous weight {list(weight.shape)}")
    x = x if x.stride(2) == 1 else x.contiguous()
    n = weight.shape[2]
    out = library.empty(tokens, heads, n)
    library.call(
        _HEADS_LINEAR,
        KINDS[weight.dtype],
        weight.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        out.data_ptr(),
        tokens,
        heads,
        n,
        k,
        torch.get_num_threads(),
    )
    return out


def write_latent_cache(
    library: Library, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As `kernels.reference.latent.write_latent_cache`; IndexError: no such slot."""
    latent, rope = _rows(latent), _rows(rope)
    (tokens, latent_size), rope_size = latent.shape, rope.shape[1]
    if rope.shape[0] != tokens or cache.shape[-1] != _width(cache, latent_size + rope_size):
        raise ValueError(f"a cache {list(cache.shape)} does not hold {list(latent.shape)} and {list(rope.shape)}")
    slots = cache.shape[0] * cache.shape[1]
    bad = library.call(
        _WRITE,
        latent.data_ptr(),
        latent.stride(0),
        rope.data_ptr(),
        rope.stride(0),
        CACHE_KINDS[cache.dtype],
        cache.data_ptr(),
        slot_mapping.data_ptr(),
        slots,
        tokens,
        latent_size,
        rope_size,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise no_such_slot(slot_mapping, bad, slots)


def latent_attention(
    library: Library,
    query: torch.Tensor,
    query_rope: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """As `kernels.reference.latent.latent_attention`.

    Raises:
        IndexError: a block id is outside of the cache, or a row's numbers contradict each other.
    """
    query, query_rope = as_float32(query), as_float32(query_rope)
    (tokens, heads, latent_size), rope_size = query.shape, query_rope.shape[2]
    fits = query_rope.shape[:2] == (tokens, heads) and rope_size
    if not fits or cache.shape[-1] != _width(cache, latent_size + rope_size):
        raise ValueError(f"a cache {list(cache.shape)} is not of {list(query.shape)} and {list(query_rope.shape)}")
    out = library.empty(tokens, heads, latent_size)
    slots = cache.shape[0] * cache.shape[1]
    bad = library.call(
        _ATTENTION,
        *plan_of(metadata),
        slots,
        query.data_ptr(),
        query_rope.data_ptr(),
        tokens,
        CACHE_KINDS[cache.dtype],
        cache.data_ptr(),
        out.data_ptr(),
        heads,
        latent_size,
        rope_size,
        scale,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise out_of_range(metadata, bad, slots)
    return out


def _width(cache: torch.Tensor, channels: int) -> int:
    """Of a row: in 8 bits with two scales."""
    return channels + (2 * SCALE_BYTES if cache.dtype in QUANTIZED_CACHE_DTYPES else 0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """float32 [N, width] without gaps inside a row."""
    return x if x.stride(1) == 1 else x.contiguous()
