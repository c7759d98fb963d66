"""Attention over a paged cache, in plain PyTorch.

Owns the cache layout of this implementation and the plan it derives once a step: rows with one new token are gathered
into padded batches of similar length, every other row is computed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llm.forward import AttentionMetadata, KVCacheSpec

# Query tokens of one row that are masked at a time, to bound the mask's memory.
_QUERY_CHUNK = 512


def kv_cache_shape(spec: KVCacheSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of one layer's key cache; the value cache has the same."""
    return (spec.num_kv_heads, num_blocks * block_size, spec.head_size)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store key and value [N, kv_heads, head_size] at the slots int64 [N]."""
    key_cache.index_copy_(1, slot_mapping, key.transpose(0, 1).to(key_cache.dtype))
    value_cache.index_copy_(1, slot_mapping, value.transpose(0, 1).to(value_cache.dtype))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v, causal, over what the cache holds for each row.

    Shapes: query float32 [N, heads, head_size], caches as `kv_cache_shape`; returns [N, heads, head_size].
    A token at position p sees positions max(0, p - sliding_window + 1) to p.
    """
    if metadata.plan is None:
        metadata.plan = _plan(metadata, sliding_window)
    out = torch.empty_like(query)
    for group in metadata.plan.decode:
        key, value = _gather(key_cache, group.slots), _gather(value_cache, group.slots)
        out[group.tokens] = _attend_decode(query[group.tokens], key, value, group.mask, scale)
    for row in metadata.plan.prefill:
        key, value = _gather(key_cache, row.slots), _gather(value_cache, row.slots)
        out[row.start : row.end] = _attend_row(query[row.start : row.end], key, value, scale, sliding_window)
    return out


@dataclass
class _DecodeGroup:
    """Rows with one query token. tokens int64 [R], slots int64 [R * L], mask bool [R, 1, L] (True: seen)."""

    tokens: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass
class _PrefillRow:
    """One row with several query tokens, start to end in the batch. slots int64 [keys]."""

    start: int
    end: int
    slots: torch.Tensor


@dataclass
class _Plan:
    decode: list[_DecodeGroup]
    prefill: list[_PrefillRow]


def _plan(metadata: AttentionMetadata, sliding_window: int | None) -> _Plan:
    by_width: dict[int, list[int]] = {}
    prefill: list[_PrefillRow] = []
    starts = [0]
    for row, (count, length) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
        starts.append(starts[-1] + count)
        if count == 1:
            by_width.setdefault((length - 1).bit_length(), []).append(row)
        else:
            slots = _slots(metadata, torch.tensor([row]), length).view(-1)
            if sliding_window is not None:
                slots[: max(0, length - count - sliding_window + 1)] = 0
            prefill.append(_PrefillRow(starts[row], starts[row + 1], slots))
    decode = [_decode_group(metadata, rows, starts, sliding_window) for rows in by_width.values()]
    return _Plan(decode, prefill)


def _decode_group(
    metadata: AttentionMetadata, rows: list[int], starts: list[int], sliding_window: int | None
) -> _DecodeGroup:
    index = torch.tensor(rows)
    longest = max(metadata.seq_lens_list[row] for row in rows)
    lengths = metadata.seq_lens[index].unsqueeze(1)
    positions = torch.arange(longest)
    mask = positions < lengths
    if sliding_window is not None:
        mask &= positions >= lengths - sliding_window
    # Slots this row may not see can hold another request's NaN, and 0 * NaN is NaN: read slot 0, which nobody writes.
    slots = _slots(metadata, index, longest).masked_fill_(~mask, 0)
    return _DecodeGroup(torch.tensor([starts[row] for row in rows]), slots.view(-1), mask.unsqueeze(1))


def _slots(metadata: AttentionMetadata, rows: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [rows, length]: cache slot of each position."""
    size = metadata.block_size
    blocks = metadata.block_table[rows, : -(-length // size)].long()
    return (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(1)[:, :length]


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.index_select(1, slots).float()


def _attend_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [R, heads, d], key and value [kv_heads, R * L, d], mask [R, 1, L] -> [R, heads, d]."""
    rows, heads, size = query.shape
    kv_heads = key.shape[0]
    grouped = query.view(rows, kv_heads, -1, size).transpose(0, 1).reshape(kv_heads * rows, -1, size)
    scores = torch.bmm(grouped * scale, key.view(kv_heads * rows, -1, size).transpose(1, 2))
    scores = scores.view(kv_heads, rows, heads // kv_heads, -1).masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(dim=-1).view(kv_heads * rows, heads // kv_heads, -1)
    out = torch.bmm(weights, value.view(kv_heads * rows, -1, size))
    return out.view(kv_heads, rows, -1, size).transpose(0, 1).reshape(rows, heads, size)


def _attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sliding_window: int | None
) -> torch.Tensor:
    """query [count, heads, d], the last `count` of the keys; key and value [kv_heads, keys, d] -> [count, heads, d]."""
    count, keys = query.shape[0], key.shape[1]
    query = query.transpose(0, 1)
    if count == keys and sliding_window is None:
        return _sdpa(query, key, value, scale, None).transpose(0, 1)
    chunks = []
    for start in range(0, count, _QUERY_CHUNK):
        end = min(start + _QUERY_CHUNK, count)
        positions = torch.arange(keys - count + start, keys - count + end).unsqueeze(1)
        mask = torch.arange(keys) <= positions
        if sliding_window is not None:
            mask &= torch.arange(keys) > positions - sliding_window
        chunks.append(_sdpa(query[:, start:end], key, value, scale, mask))
    return torch.cat(chunks, dim=1).transpose(0, 1)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """[heads, q, d] x [kv_heads, k, d] -> [heads, q, d]; mask None: causal, the same number of queries and keys."""
    out = F.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0)
