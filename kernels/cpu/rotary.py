"""Rotary position embeddings in C++; `kernels/reference/rotary.py` defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library, in_type
from llm.kernels.cpu.signatures import KERNELS

_ROTARY = KERNELS["llm_rotary"]


def rotary_embedding(
    library: Library,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.reference.rotary.rotary_embedding`.

    Raises:
        IndexError: a position is outside the table.
        ValueError: the numbers of queries, keys and positions differ.
    """
    dtype = query.dtype
    (query, query_stride), (key, key_stride) = _rows(query), _rows(key)
    (tokens, width), (keys, key_width) = query.shape, key.shape
    if keys != tokens or positions.shape != (tokens,):
        raise ValueError(f"{tokens} tokens need as many positions and keys, got {list(positions.shape)}, {keys}")
    length, rotated = cos_sin_cache.shape
    query_out, key_out = library.empty(tokens, width), library.empty(tokens, key_width)
    bad = library.call(
        _ROTARY,
        positions.data_ptr(),
        tokens,
        cos_sin_cache.data_ptr(),
        length,
        rotated // 2,
        is_neox_style,
        query.data_ptr(),
        query_stride,
        query_out.data_ptr(),
        width // head_size,
        key.data_ptr(),
        key_stride,
        key_out.data_ptr(),
        key_width // head_size,
        head_size,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise _no_such_position(positions, bad, length)
    return in_type(query_out, dtype), in_type(key_out, dtype)


def _no_such_position(positions: torch.Tensor, token: int, length: int) -> IndexError:
    return IndexError(f"positions[{token}] is {int(positions[token])}, the rotary table has {length}")


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(float32 [N, width], contiguous within a row; the stride between rows)."""
    x = x if x.dtype == torch.float32 else x.float()
    between, inside = x.stride()
    return (x, between) if inside == 1 else (x.contiguous(), x.shape[1])
