"""Rotary position embeddings in C++, alone and with the write into the cache.

`kernels/reference/rotary.py` defines them.
"""

from __future__ import annotations

import torch

from llm.kernels.cpu.attention import cache_sizes, no_such_slot
from llm.kernels.cpu.library import INT, POINTER, Kernel, Library
from llm.kernels.cpu.tensors import KINDS, in_type

_TABLE = (POINTER, INT, POINTER, INT, INT, INT)  # positions, tokens, table, its length, pairs, whether of halves
_ROTARY = Kernel("llm_rotary", *_TABLE, *(POINTER, INT, POINTER, INT) * 2, INT, INT)
_ROTARY_WRITE = Kernel(
    "llm_rotary_write_kv",
    *_TABLE,
    *(POINTER, INT, POINTER, INT),  # query, its stride, out, heads
    *(POINTER, INT) * 2,  # key, value and their strides
    *(INT, POINTER, POINTER, POINTER, INT),  # kind, caches, slots of the tokens, slots of the cache
    *(INT,) * 3,  # kv heads, head size, threads
)


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
        IndexError: a position is not in the table.
        ValueError: not as many positions or keys as queries.
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


def rotary_write_kv(
    library: Library,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    is_neox_style: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """As `kernels.reference.rotary.rotary_write_kv`, in the cache's layout of `kernels.cpu.attention.kv_cache_shapes`.

    Raises:
        IndexError: a position is not in the table, or a slot not in the cache; nothing is written then.
        ValueError: shapes that do not fit each other.
    """
    dtype = query.dtype
    (query, query_stride), (key, key_stride), (value, value_stride) = _rows(query), _rows(key), _rows(value)
    tokens, width = query.shape
    slots, kv_heads, cached_size = cache_sizes(key_cache)
    length, rotated = cos_sin_cache.shape
    if not (key.shape == value.shape == (tokens, kv_heads * head_size) and cached_size == head_size):
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} do not fit {tokens} tokens in a cache of {kv_heads} "
            f"heads of {cached_size}"
        )
    if rotated > head_size or width % head_size:
        raise ValueError(f"{rotated} rotated channels and a query of {width} do not fit heads of {head_size} channels")
    if not positions.shape == slot_mapping.shape == (tokens,):
        raise ValueError(
            f"{tokens} tokens need as many positions and slots, got {list(positions.shape)}, {list(slot_mapping.shape)}"
        )
    query_out = library.empty(tokens, width)
    bad = library.call(
        _ROTARY_WRITE,
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
        value.data_ptr(),
        value_stride,
        KINDS[key_cache.dtype],
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        slots,
        kv_heads,
        head_size,
        torch.get_num_threads(),
    )
    if bad >= tokens:
        raise no_such_slot(slot_mapping, bad - tokens, slots)
    if bad >= 0:
        raise _no_such_position(positions, bad, length)
    return in_type(query_out, dtype)


def _no_such_position(positions: torch.Tensor, token: int, length: int) -> IndexError:
    return IndexError(f"positions[{token}] is {int(positions[token])}, the rotary table has {length}")


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """float32 [N, width] without gaps inside a row, and the distance between rows."""
    x = x if x.dtype == torch.float32 else x.float()
    between, inside = x.stride()
    return (x, between) if inside == 1 else (x.contiguous(), x.shape[1])
