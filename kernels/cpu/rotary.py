"""Rotary position embeddings in C++; `kernels/reference/rotary.py` defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import INT, POINTER, Library

_ROTARY = (POINTER, INT, POINTER, INT, INT, INT, *(POINTER, INT, POINTER, INT) * 2, INT, INT)


def rotary_embedding(
    library: Library,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.reference.rotary.rotary_embedding`; IndexError: a position is not in the table."""
    dtype = query.dtype
    query, key = _rows(query), _rows(key)
    tokens = positions.shape[0]
    length, rotated = cos_sin_cache.shape
    query_out, key_out = (torch.empty(x.shape, dtype=torch.float32) for x in (query, key))
    bad = library.function("llm_rotary", *_ROTARY, result=INT)(
        positions.data_ptr(),
        tokens,
        cos_sin_cache.data_ptr(),
        length,
        rotated // 2,
        is_neox_style,
        query.data_ptr(),
        query.stride(0),
        query_out.data_ptr(),
        query.shape[1] // head_size,
        key.data_ptr(),
        key.stride(0),
        key_out.data_ptr(),
        key.shape[1] // head_size,
        head_size,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise IndexError(f"positions[{bad}] is {int(positions[bad])}, the rotary table has {length}")
    return query_out.to(dtype), key_out.to(dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """float32 [N, width] without gaps inside a row."""
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(1) == 1 else x.contiguous()
