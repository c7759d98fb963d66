"""Attention over a paged cache, and latent attention, in C++; attention.cpp documents the layout.

Every call checks block tables and slots against the cache before it computes anything: an index out of range raises
IndexError instead of reading other memory.
"""

from __future__ import annotations

import torch

from llm.forward import QUANTIZED_CACHE_DTYPES, SCALE_BYTES, AttentionMetadata, KVCacheSpec
from llm.kernels.cpu.library import KINDS, Library, as_float32, pointer
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.weight import KINDS as KIND_NAMES
from llm.kernels.weight import SCALED_KINDS

# Slots per panel; LANES in attention.cpp.
PANEL = 16
_ATTENTION = KERNELS["llm_paged_attention"]
_WRITE = KERNELS["llm_write_kv_cache"]
_HEADS_LINEAR = KERNELS["llm_heads_linear"]
_WRITE_LATENT = KERNELS["llm_write_latent_cache"]
_LATENT_ATTENTION = KERNELS["llm_latent_attention"]
CACHE_KINDS = {**KINDS, **{SCALED_KINDS[name]: KIND_NAMES.index(name) for name in ("int8", "float8")}}


def kv_cache_shapes(
    library: Library, spec: KVCacheSpec, num_blocks: int, block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Keys [panels, kv_heads, head_size, 16] and values [panels, kv_heads, 16, head_size]; the last panel is spare.

    Of 8 bits both are [panels, kv_heads, bytes]: quantized_cache.h describes such a record.
    """
    panels = -(-num_blocks * block_size // PANEL) + 1
    if spec.is_quantized:
        shape = (panels, spec.num_kv_heads, (-(-spec.head_size // 4) * 4 + SCALE_BYTES) * PANEL)
        return shape, shape
    return (panels, spec.num_kv_heads, spec.head_size, PANEL), (panels, spec.num_kv_heads, PANEL, spec.head_size)


def write_kv_cache(
    library: Library,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    static_scales: torch.Tensor | None = None,
) -> None:
    """Store key and value float32 [N, kv_heads, head_size] at the slots int64 [N]; IndexError for a bad slot.

    `static_scales` as of the definition, contiguous.
    """
    key, value = _by_token(key), _by_token(value)
    tokens, kv_heads, head_size = key.shape
    slots = _slots(key_cache)
    bad = library.call(
        _WRITE,
        key.data_ptr(),
        key.stride()[0],
        value.data_ptr(),
        value.stride()[0],
        CACHE_KINDS[key_cache.dtype],
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        slots,
        tokens,
        kv_heads,
        head_size,
        pointer(static_scales),
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise no_such_slot(slot_mapping, bad, slots)


def paged_attention(
    library: Library,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    static_scales: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """softmax(q k^T * scale) v; as `kernels.reference.attention.paged_attention`, in the layout of `kv_cache_shapes`.

    Raises:
        IndexError: a block id is outside the cache, or a batch row's start and length contradict each other.
    """
    plan = plan_of(metadata)
    query = _by_token(query)
    tokens, heads, head_size = query.shape
    out = library.empty(tokens, heads, head_size)
    slots, kv_heads = _slots(key_cache), key_cache.shape[1]
    queries = query.data_ptr(), query.stride()[0], tokens
    bad = library.call(
        _ATTENTION,
        *plan,
        slots,
        *queries,
        CACHE_KINDS[key_cache.dtype],
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        *(heads, kv_heads, head_size),
        sliding_window or 0,
        attention_chunk or 0,
        0 if causal else (sliding_window or slots) - 1,
        scale,
        soft_cap or 0.0,
        pointer(sinks),
        pointer(alibi_slopes),
        pointer(static_scales),
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise out_of_range(metadata, bad, slots)
    return out


def plan_of(metadata: AttentionMetadata) -> tuple[int, ...]:
    """The kernel's arguments that describe the batch rows; made once per step and group of layers.

    They are addresses: `metadata` keeps the tensors alive.
    """
    if metadata.plan is None:
        metadata.plan = _plan(metadata)
    return metadata.plan


def _plan(metadata: AttentionMetadata) -> tuple[int, ...]:
    for name in ("block_table", "query_start_loc", "seq_lens"):
        tensor = getattr(metadata, name)
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise TypeError(f"{name} must be contiguous int32, got {tensor.dtype}")
    return (
        metadata.block_table.data_ptr(),
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        *metadata.block_table.shape,
        metadata.block_size,
    )


def out_of_range(metadata: AttentionMetadata, row: int, slots: int) -> IndexError:
    return IndexError(
        f"row {row} of the attention step is out of range: block table {metadata.block_table[row].tolist()}, length "
        f"{int(metadata.seq_lens[row])}, query_start_loc {metadata.query_start_loc[row : row + 2].tolist()}; the cache "
        f"holds {slots // metadata.block_size} blocks of {metadata.block_size}"
    )


def _slots(key_cache: torch.Tensor) -> int:
    return (key_cache.shape[0] - 1) * PANEL


def no_such_slot(slot_mapping: torch.Tensor, token: int, slots: int) -> IndexError:
    return IndexError(f"slot_mapping[{token}] is {int(slot_mapping[token])}, the cache has {slots} slots")


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """float32 [N, heads, head_size], contiguous within a token; tokens may have any stride."""
    _, head, channel = x.stride()
    return x if channel == 1 and head == x.shape[2] else x.contiguous()


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
    """As `kernels.reference.attention.write_latent_cache`; IndexError: no such slot."""
    latent, rope = _rows(latent), _rows(rope)
    (tokens, latent_size), rope_size = latent.shape, rope.shape[1]
    if rope.shape[0] != tokens or cache.shape[-1] != _width(cache, latent_size + rope_size):
        raise ValueError(f"a cache {list(cache.shape)} does not hold {list(latent.shape)} and {list(rope.shape)}")
    slots = cache.shape[0] * cache.shape[1]
    bad = library.call(
        _WRITE_LATENT,
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
    """As `kernels.reference.attention.latent_attention`.

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
        _LATENT_ATTENTION,
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
