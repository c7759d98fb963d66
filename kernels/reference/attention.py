"""Attention over a paged cache, and latent attention, in plain PyTorch.

Once per step a plan is made: batch rows with one new token are gathered into padded groups of similar length, every
other batch row is computed by itself. Only slots that a batch row may see are read: the others can hold another
request's NaN, and 0 * NaN is NaN.

Latent attention is that of DeepSeek-V2 (arXiv:2405.04434), in the form that multiplies the query where the paper
multiplies the key: GEMMs with a matrix per head, and a KV cache [blocks, block_size, latent + rope] in every backend.

A KV cache of int8 or float8_e4m3fn is rounded here for every backend: an element is code * scale. The scale of a token
in a KV head is its largest magnitude over the largest code, rounded up to bfloat16; NaN if an element is not finite.
With static scales, of channels, it is 1 (or NaN); a code is x / scale[channel] + offset[channel], and stands for
(code - offset[channel]) * scale[channel]. In this layout a token's codes in a KV head come first, then its scale; a
latent row has two scales behind its codes, of the latent and of the rotated key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llm.forward import QUANTIZED_CACHE_DTYPES, SCALE_BYTES, AttentionMetadata, KVCacheSpec

# Query tokens of one batch row that are masked at a time, to bound the mask's memory.
_QUERY_CHUNK = 512
# Elements of keys that are gathered at a time, to fit in the processor's cache.
_GATHER_ELEMENTS = 1 << 20


def kv_cache_shapes(spec: KVCacheSpec, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's key cache and value cache, here both [kv_heads, slots, head_size], scales behind it."""
    shape = (spec.num_kv_heads, num_blocks * block_size, spec.head_size + (SCALE_BYTES if spec.is_quantized else 0))
    return shape, shape


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    static_scales: torch.Tensor | None = None,
) -> None:
    """Store key and value [N, kv_heads, head_size] at the slots int64 [N], rounded to the cache's dtype.

    static_scales: of a quantized cache whose scales are known, float32 [4, kv_heads, head_size]: scales and offsets of
    keys, then of values. Offsets are of int8.
    """
    for new, cache, part in ((key, key_cache, 0), (value, value_cache, 2)):
        if cache.dtype in QUANTIZED_CACHE_DTYPES:
            static = None if static_scales is None else static_scales[part : part + 2]
            rounded = stored(*quantize_heads(new, cache.dtype, static))
            cache.view(torch.uint8).index_copy_(1, slot_mapping, rounded.transpose(0, 1))
        else:
            cache.index_copy_(1, slot_mapping, new.transpose(0, 1).to(cache.dtype))


def paged_attention(
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
    """softmax(q k^T * scale) v over the cached keys and values of each batch row.

    Shapes: query float [N, heads, head_size], caches as `kv_cache_shapes`; returns [N, heads, head_size] of its type,
    in which keys and values are multiplied; sums and softmax are float32. Values may have fewer channels than keys;
    the result then has as many as they.
    A token at position p sees positions max(0, p - sliding_window + 1) to p; if not `causal`, also those to
    p + sliding_window - 1, or all, of a row whose tokens are all in this step. With `attention_chunk`, and no window,
    it sees those of its own chunk of so many positions, the first of which begins at 0. With `soft_cap` a score s
    becomes soft_cap * tanh(s / soft_cap) before the softmax. `sinks` float32 [heads] are scores of one more key, whose
    value is zero (attention sinks as gpt-oss trains them). `alibi_slopes` float32 [heads], if `causal`: to a score,
    after the soft cap, slope * (position of the key - position of the query) is added. `static_scales` as in
    `write_kv_cache`.
    """
    scoring = _Scoring(scale, soft_cap, sinks, alibi_slopes, attention_chunk)
    if metadata.plan is None:
        metadata.plan = _plan(metadata, sliding_window, key_cache.shape[0] * key_cache.shape[2], query.dtype)
    key_scales, value_scales = (None, None) if static_scales is None else (static_scales[:2], static_scales[2:])
    dtype, is_quantized = query.dtype, value_cache.dtype in QUANTIZED_CACHE_DTYPES
    out = query.new_empty(*query.shape[:2], value_cache.shape[2] - (SCALE_BYTES if is_quantized else 0))
    key_buffer, value_buffer = metadata.plan.buffers
    for group in metadata.plan.decode:
        key = _gather_into(key_buffer, key_cache, group.slots, key_scales)
        value = _gather_into(value_buffer, value_cache, group.slots, value_scales)
        out[group.tokens] = _attend_decode(query[group.tokens], key, value, group, scoring)
    for row in metadata.plan.prefill:
        key = _gather(key_cache, row.slots, key_scales).to(dtype)
        value = _gather(value_cache, row.slots, value_scales).to(dtype)
        part = query[row.start : row.end]
        out[row.start : row.end] = _attend_row(part, key, value, scoring, sliding_window, causal)
    return out


@dataclass
class _Scoring:
    """How scores are computed: the arguments of `paged_attention`."""

    scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    attention_chunk: int | None

    @property
    def is_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None and self.alibi_slopes is None

    def in_chunk(self, mask: torch.Tensor, distances: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of the keys that `mask` lets the queries at `positions` see, those of the query's own chunk."""
        if self.attention_chunk is None:
            return mask
        return mask & (distances >= -(positions % self.attention_chunk))


@dataclass
class _DecodeGroup:
    """Batch rows with one query token. tokens int64 [R], slots int64 [R * L], mask bool [R, 1, L] (True: seen).

    distances: float32 [R, 1, L], of each key from the query: negative before it. positions: int32 [R, 1, 1].
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    distances: torch.Tensor
    positions: torch.Tensor


@dataclass
class _PrefillRow:
    """A batch row with several query tokens, [start, end) of the step's. slots int64 [keys]: what any of them sees."""

    start: int
    end: int
    slots: torch.Tensor


@dataclass
class _Plan:
    """`buffers` hold the gathered keys and values of a decode group, of the query's type.

    They are kept for the whole step: memory this large is unmapped when it is freed, and the page faults of a new
    allocation in every layer can take longer than attention.
    """

    decode: list[_DecodeGroup]
    prefill: list[_PrefillRow]
    buffers: tuple[torch.Tensor, torch.Tensor]


def _plan(
    metadata: AttentionMetadata, sliding_window: int | None, elements_per_token: int, dtype: torch.dtype
) -> _Plan:
    prefill = []
    # log2 of the number of blocks a batch row sees, rounded up -> [(batch row, first block it sees, how many it sees)].
    by_width: dict[int, list[tuple[int, int, int]]] = {}
    size = metadata.block_size
    starts = [0]
    for row, (count, length) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
        starts.append(starts[-1] + count)
        seen_from = 0 if sliding_window is None else max(0, length - count - sliding_window + 1)
        first = seen_from // size
        if count == 1:
            width = -(-length // size) - first
            by_width.setdefault((width - 1).bit_length(), []).append((row, first, width))
        else:
            slots = _slots(metadata.block_table[row, first:], size)[seen_from - first * size : length - first * size]
            prefill.append(_PrefillRow(starts[row], starts[row + 1], slots))
    decode = []
    for rows in by_width.values():
        at_once = max(1, _GATHER_ELEMENTS // (elements_per_token * size * max(width for _, _, width in rows)))
        for some in range(0, len(rows), at_once):
            decode.append(_decode_group(metadata, rows[some : some + at_once], sliding_window))
    largest = max((len(group.slots) for group in decode), default=0) * elements_per_token
    buffers = (torch.empty(largest, dtype=dtype, device=metadata.block_table.device) for _ in range(2))
    return _Plan(decode, prefill, (next(buffers), next(buffers)))


def _decode_group(
    metadata: AttentionMetadata, rows: list[tuple[int, int, int]], sliding_window: int | None
) -> _DecodeGroup:
    """`rows` as in `_plan`: (batch row, first block it sees, how many it sees)."""
    size, device = metadata.block_size, metadata.block_table.device
    index = _numbers([row for row, _, _ in rows], device).unsqueeze(-1)  # int64 [R, 1], as `first`
    first = torch.zeros_like(index)
    if sliding_window is not None:
        first = (metadata.seq_lens[index] - sliding_window).clamp_(min=0).long() // size
    width = max(width for _, _, width in rows)
    columns = (first + torch.arange(width, device=device)).clamp_(max=metadata.block_table.shape[1] - 1)
    slots = _slots(metadata.block_table[index, columns], size)
    positions = first * size + torch.arange(width * size, device=device)
    lengths = metadata.seq_lens[index]
    mask = positions < lengths
    if sliding_window is not None:
        mask &= positions >= lengths - sliding_window
    slots.masked_fill_(~mask, 0)  # slot 0 is never written
    tokens = metadata.query_start_loc[index[:, 0]].long()
    distances = (positions - (lengths - 1)).float()
    own = (lengths - 1).unsqueeze(1)
    return _DecodeGroup(tokens, slots.view(-1), mask.unsqueeze(1), distances.unsqueeze(1), own)


def _numbers(rising: list[int], device: torch.device) -> torch.Tensor:
    """int64, rising numbers. Made on the device: a copy from the host's memory would hold up the step."""
    breaks = [place for place in range(1, len(rising)) if rising[place] != rising[place - 1] + 1]
    runs = zip([0, *breaks], [*breaks, len(rising)], strict=True)
    return torch.cat([torch.arange(rising[start], rising[end - 1] + 1, device=device) for start, end in runs])


def _slots(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Block ids [..., blocks] -> int64 [..., blocks * size], the cache slots of their positions."""
    return (blocks.long().unsqueeze(-1) * size + torch.arange(size, device=blocks.device)).flatten(-2)


def _gather(cache: torch.Tensor, slots: torch.Tensor, static: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [kv_heads, slots, head_size]. static: [2, kv_heads, head_size] of a quantized cache, or None."""
    if cache.dtype in QUANTIZED_CACHE_DTYPES:
        return dequantize_heads(cache.view(torch.uint8).index_select(1, slots), cache.dtype, static)
    return cache.index_select(1, slots).float()


def _gather_into(
    buffer: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, static: torch.Tensor | None
) -> torch.Tensor:
    """`_gather` into the buffer's memory."""
    if cache.dtype in QUANTIZED_CACHE_DTYPES:
        return _gather(cache, slots, static).to(buffer.dtype)
    shape = (cache.shape[0], len(slots), cache.shape[2])
    out = buffer[: math.prod(shape)].view(shape)
    if cache.dtype == out.dtype:
        return torch.index_select(cache, 1, slots, out=out)
    return out.copy_(cache.index_select(1, slots))


def _attend_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: _DecodeGroup, scoring: _Scoring
) -> torch.Tensor:
    """query [R, heads, d], key and value [kv_heads, R * L, d or other] -> [R, heads, d of value]."""
    rows, heads, size = query.shape
    kv_heads = key.shape[0]
    grouped = query.view(rows, kv_heads, -1, size).transpose(0, 1)
    key, value = (tensor.unflatten(1, (rows, -1)) for tensor in (key, value))
    of_heads = (kv_heads, 1, -1, 1)
    mask = scoring.in_chunk(group.mask, group.distances, group.positions)
    out = _attend_explicitly(grouped, key, value, mask, group.distances, scoring, of_heads)
    return out.transpose(0, 1).reshape(rows, heads, -1)


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: _Scoring,
    sliding_window: int | None,
    causal: bool,
) -> torch.Tensor:
    """query [count, heads, d], the last `count` of the keys; key and value [kv_heads, keys, d] -> [count, heads, d]."""
    count, keys = query.shape[0], key.shape[1]
    query = query.transpose(0, 1)
    if causal and count == keys and sliding_window is None and scoring.attention_chunk is None and scoring.is_plain:
        return _sdpa(query, key, value, scoring.scale, None).transpose(0, 1)
    seen = torch.arange(keys, device=query.device)
    chunks = []
    for start in range(0, count, _QUERY_CHUNK):
        end = min(start + _QUERY_CHUNK, count)
        positions = seen[keys - count + start : keys - count + end].unsqueeze(1)
        mask = seen <= positions if causal else (seen >= 0).expand(end - start, -1).clone()
        if sliding_window is not None:
            mask &= seen > positions - sliding_window
            mask &= seen < positions + sliding_window
        distances = (seen - positions).float()
        mask = scoring.in_chunk(mask, distances, positions)
        chunks.append(_attend_masked(query[:, start:end], key, value, mask, distances, scoring))
    return torch.cat(chunks, dim=1).transpose(0, 1)


def _attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    distances: torch.Tensor,
    scoring: _Scoring,
) -> torch.Tensor:
    """query [heads, q, d], key and value [kv_heads, k, d], mask and distances [q, k] -> [heads, q, d]."""
    if scoring.is_plain:
        return _sdpa(query, key, value, scoring.scale, mask)
    grouped = query.unflatten(0, (key.shape[0], -1))
    groups = grouped.shape[1]
    key, value = (tensor.unsqueeze(1).expand(-1, groups, -1, -1) for tensor in (key, value))
    return _attend_explicitly(grouped, key, value, mask, distances, scoring, (-1, groups, 1, 1)).flatten(0, 1)


def _attend_explicitly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    distances: torch.Tensor,
    scoring: _Scoring,
    of_heads: tuple[int, int, int, int],
) -> torch.Tensor:
    """query [a, b, q, d], key and value [a, b, k, d], mask and distances to [a, b, q, k]: -> [a, b, q, d].

    of_heads: the shape of what each head has one of, which expands to [a, b, q, 1].
    """
    scores = torch.matmul(query * scoring.scale, key.transpose(2, 3)).float()
    if scoring.soft_cap is not None:
        scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if scoring.alibi_slopes is not None:
        scores += scoring.alibi_slopes.view(of_heads) * distances
    scores.masked_fill_(~mask, float("-inf"))
    if scoring.sinks is None:
        return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
    column = scoring.sinks.float().view(of_heads).expand(*scores.shape[:-1], 1)
    return torch.matmul(torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype), value)


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """[heads, q, d] x [kv_heads, k, d] -> [heads, q, d]; mask None: causal, as many queries as keys."""
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


# --- Latent attention. ---


def heads_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[t, h] = x[t, h] W_h: x float [N, heads, k], weight float [heads, k, n] -> [N, heads, n] of the type of x."""
    return torch.bmm(x.transpose(0, 1), weight.to(x.dtype)).transpose(0, 1).contiguous()


def write_latent_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store latents float [N, latent] and rotated keys float [N, rope], side by side, at the slots int64 [N]."""
    if cache.dtype not in QUANTIZED_CACHE_DTYPES:
        both = torch.cat((latent, rope), dim=-1).to(cache.dtype)
        cache.view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, both)
        return
    parts = [stored(*quantize_heads(part.unsqueeze(1), cache.dtype))[:, 0] for part in (latent, rope)]
    codes, scales = ([part[:, where] for part in parts] for where in (slice(-SCALE_BYTES), slice(-SCALE_BYTES, None)))
    row = torch.cat([*codes, *scales], dim=1)
    cache.view(torch.uint8).view(-1, cache.shape[-1]).index_copy_(0, slot_mapping, row)


def latent_attention(
    query: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float
) -> torch.Tensor:
    """Causal attention in which a token's row of the cache is its key for every head, and its latent its value.

    Shapes: query float [N, heads, latent], query_rope float [N, heads, rope] -> [N, heads, latent].
    """
    keys = cache.view(1, -1, cache.shape[-1])
    if cache.dtype in QUANTIZED_CACHE_DTYPES:
        keys = _dequantized(keys.view(torch.uint8), cache.dtype, query.shape[-1])
    values = keys[..., : query.shape[-1]]
    return paged_attention(torch.cat((query, query_rope), dim=-1), keys, values, metadata, scale=scale)


def _dequantized(rows: torch.Tensor, dtype: torch.dtype, latent_size: int) -> torch.Tensor:
    """uint8 [1, slots, latent + rope + scales] -> float32 [1, slots, latent + rope]."""
    codes, scales = rows[..., : -2 * SCALE_BYTES], rows[..., -2 * SCALE_BYTES :]
    parts = codes.split([latent_size, codes.shape[-1] - latent_size], dim=-1)
    both = zip(parts, scales.split(SCALE_BYTES, dim=-1), strict=True)
    return torch.cat([dequantize_heads(torch.cat(part, dim=-1), dtype) for part in both], dim=-1)


# --- Caches of 8 bits. ---

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_heads(
    x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float [N, kv_heads, size] -> (codes of `dtype`, scales bfloat16 [N, kv_heads]).

    static: float32 [2, kv_heads, size], scales and offsets of channels.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    finite = largest.isfinite()
    if static is None:
        scale = _rounded_up(torch.where(finite, largest, 0) / LARGEST_CODE[dtype])
        divisor = torch.where(scale == 0, 1, scale.float()).unsqueeze(-1)
    else:
        scale, divisor = torch.ones_like(largest, dtype=torch.bfloat16), static[0]
    quotient = torch.where(finite.unsqueeze(-1), x, 0) / divisor
    if dtype == torch.int8:
        quotient = quotient.round() if static is None else quotient.round() + static[1]
        least = -127 if static is None else -128
        codes = quotient.clamp(least, 127).to(dtype)
    else:
        codes = quotient.clamp(-LARGEST_CODE[dtype], LARGEST_CODE[dtype]).to(dtype)
    return codes, torch.where(finite, scale, float("nan"))


def stored(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [N, kv_heads, size + 2], what a cache keeps of a token."""
    return torch.cat((codes.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)), dim=-1)


def dequantize_heads(tokens: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [kv_heads, tokens, size + 2] -> float32 [kv_heads, tokens, size]."""
    codes = tokens[..., :-SCALE_BYTES].contiguous().view(dtype).float()
    scaled = codes * tokens[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()
    return scaled if static is None else (scaled - static[1].unsqueeze(1)) * static[0].unsqueeze(1)


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 that is not below x, float32 and not negative."""
    return (((x.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32).to(torch.bfloat16)
