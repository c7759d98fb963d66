"""Attention over a paged cache in C++; `kernels/reference` defines it, attention.cpp documents the layout.

Every call checks block tables and slots against the cache before it computes anything: an index out of range raises
IndexError instead of reading other memory.
"""

from __future__ import annotations

import torch

from llm.forward import SCALE_BYTES, AttentionMetadata, KVCacheSpec
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import KINDS, pointer
from llm.kernels.weight import KINDS as KIND_NAMES
from llm.kernels.weight import SCALED_KINDS

# Slots per panel; LANES in attention.cpp.
PANEL = 16
_ATTENTION = KERNELS["llm_paged_attention"]
_WRITE = KERNELS["llm_write_kv_cache"]
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
