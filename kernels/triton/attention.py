"""Attention over a paged KV cache, and writing it: keys and values, and the latent of latent attention.

The layout of the caches is that of `kernels/reference`. One kernel serves prefill and decode. A tile has BM lines, a
line being a query head of a token; heads that share keys are side by side. Keys are walked in segments of `SEGMENT`
positions, counted from 0, by blocks of BN, with an online softmax; what segments give is merged in their order. With
few lines a program takes one segment, and `merge_segments` does what else the program does itself: same bits. Sums over
keys are products of matrices, the sum of the probabilities too: a reduction over a tile would depend on its shape.
"""

from __future__ import annotations

from typing import Any

import torch

import triton
import triton.language as tl
from llm.forward import QUANTIZED_CACHE_DTYPES, SCALE_BYTES, AttentionMetadata
from llm.kernels.reference import attention as definition
from llm.kernels.triton.language import (
    LEAST_TILE,
    LOG2_E,
    dot,
    float8_codes,
    from_float8,
    int8_codes,
    rounded,
    tanh,
    whole,
)
from llm.kernels.triton.launch import Target, launch, power_of_two, side_by_side, target_of

# Positions of a segment: short enough that one row of a long context keeps a GPU busy.
SEGMENT = 256
# With more lines in a row, or so many programs in all, a program takes all segments of its lines.
_FEW_LINES = 64
_MANY_PROGRAMS = 1024


@triton.jit
def _stored_scale(largest, most: tl.constexpr):
    """largest / most rounded up to bfloat16, as float32: no code is cut."""
    bits = tl.div_rn(largest, most).to(tl.int32, bitcast=True)
    return (((bits + 0xFFFF) >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_row(value, to, lanes, scale_at, static, offsets, SIZE: tl.constexpr, KIND: tl.constexpr):
    """A token of one head, float32 [lanes] -> the cache: rounded, or codes and behind them their scale."""
    inside = lanes < SIZE
    if KIND == "float":
        tl.store(to + lanes, rounded(value, to.dtype.element_ty), mask=inside)
    else:
        size = tl.abs(tl.where(inside, value, 0.0))
        largest = tl.max(tl.where(size == size, size, float("inf")), axis=0)
        is_finite = largest < float("inf")
        value = tl.where(is_finite, value, 0.0)
        if static is not None:
            scale = 1.0
            divisor = tl.load(static + lanes, mask=inside, other=1.0)
        else:
            scale = _stored_scale(tl.where(is_finite, largest, 0.0), 127.0 if KIND == "int8" else 448.0)
            divisor = tl.where(scale == 0.0, 1.0, scale)
        quotient = tl.div_rn(value, divisor)
        if KIND == "int8" and static is not None:
            cut = tl.minimum(tl.maximum(quotient, -512.0), 512.0)
            codes = int8_codes(whole(cut) + tl.load(offsets + lanes, mask=inside, other=0.0))
        elif KIND == "int8":
            codes = int8_codes(tl.maximum(quotient, -127.0))
        else:
            codes = float8_codes(quotient)
        tl.store(to + lanes, codes, mask=inside)
        bits = rounded(tl.where(is_finite, scale, float("nan")), tl.bfloat16)
        tl.store((to + scale_at).to(tl.pointer_type(tl.bfloat16)), bits)


@triton.jit
def write_cache(key, value, keys, values, slots, static, key_n, key_h, value_n, value_h, keys_h, keys_s, values_h,
                values_s, static_part, static_h, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KIND: tl.constexpr,
                LANES: tl.constexpr):  # fmt: skip
    """Store one token's key and value of one head at its slot. static: [4, heads, size] or None."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    lanes = tl.arange(0, LANES)
    own = None if static is None else static + head * static_h
    below = None if static is None else own + static_part
    row = tl.load(key + token.to(tl.int64) * key_n + head * key_h + lanes, mask=lanes < SIZE, other=0.0)
    to = keys + head.to(tl.int64) * keys_h + slot * keys_s
    _store_row(row.to(tl.float32), to, lanes, SIZE, own, below, SIZE, KIND)
    own = None if static is None else own + 2 * static_part
    below = None if static is None else below + 2 * static_part
    row = tl.load(value + token.to(tl.int64) * value_n + head * value_h + lanes, mask=lanes < VALUE_SIZE, other=0.0)
    to = values + head.to(tl.int64) * values_h + slot * values_s
    _store_row(row.to(tl.float32), to, lanes, VALUE_SIZE, own, below, VALUE_SIZE, KIND)


@triton.jit
def write_latents(latent, rope, cache, slots, latent_n, rope_n, cache_s, LATENT: tl.constexpr, ROPE: tl.constexpr,
                  KIND: tl.constexpr, LANES: tl.constexpr, ROPE_LANES: tl.constexpr):  # fmt: skip
    """A token's latent and rotated key, side by side; of codes both scales are behind them."""
    token = tl.program_id(0)
    to = cache + tl.load(slots + token).to(tl.int64) * cache_s
    lanes = tl.arange(0, LANES)
    row = tl.load(latent + token.to(tl.int64) * latent_n + lanes, mask=lanes < LATENT, other=0.0)
    _store_row(row.to(tl.float32), to, lanes, LATENT + ROPE, None, None, LATENT, KIND)
    lanes = tl.arange(0, ROPE_LANES)
    row = tl.load(rope + token.to(tl.int64) * rope_n + lanes, mask=lanes < ROPE, other=0.0)
    _store_row(row.to(tl.float32), to + LATENT, lanes, ROPE + 2, None, None, ROPE, KIND)


@triton.jit
def _codes(found, KIND: tl.constexpr):
    """int8 or the bits of e4m3 as float32."""
    return from_float8(found) if KIND == "float8" else found.to(tl.float32)


@triton.jit
def _cached(cache, rows, lanes, inside, static, offsets, dtype: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Rows of a cache [BN, lanes] as a product takes them: codes without the scales of tokens."""
    found = tl.load(cache + (rows[:, None] + lanes[None, :]), mask=inside[:, None] & (lanes < SIZE)[None, :], other=0)
    if KIND == "float":
        return found if found.dtype == dtype else rounded(found.to(tl.float32), dtype)
    else:
        value = _codes(found, KIND)
        if static is not None:
            below = tl.load(offsets + lanes, mask=lanes < SIZE, other=0.0)
            value = (value - below[None, :]) * tl.load(static + lanes, mask=lanes < SIZE, other=0.0)[None, :]
        return rounded(value, dtype)


@triton.jit
def _token_scales(cache, rows, inside):
    return tl.load((cache + rows).to(tl.pointer_type(tl.bfloat16)), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _merge(most, total, out, segment_most, segment_total, segment_out):
    """The softmax over two runs of keys, of what each gives: maxima and sums [n], out [n, channels]."""
    new = tl.maximum(most, segment_most)
    safe = tl.where(new == float("-inf"), 0.0, new)
    old_share = tl.exp2(most - safe)
    own_share = tl.exp2(segment_most - safe)
    total = total * old_share + segment_total * own_share
    return new, total, out * old_share[:, None] + segment_out * own_share[:, None]


@triton.jit
def _finish(most, total, out, sinks, heads):
    """Divide by the sum, in which a sink counts as a key without a value."""
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        new = tl.maximum(most, sink)
        total = total * tl.exp2(most - new) + tl.exp2(sink - new)
        out = out * tl.exp2(most - new)[:, None]
    return tl.div_rn(out, tl.broadcast_to(total[:, None], out.shape))


@triton.jit
def attend(q, q_rope, keys, values, out, parts, maxima, totals, ends, block_table, starts, lengths, sinks, slopes,
           static, scale, soft_cap, window, chunk, block_size, q_n, q_h, rope_n, rope_h, keys_h, keys_s, values_h,
           values_s, table_r, heads, lines_in_all, static_part, static_h, GROUP: tl.constexpr, SIZE: tl.constexpr,
           VALUE_SIZE: tl.constexpr, ROPE: tl.constexpr, LANES: tl.constexpr, VALUE_LANES: tl.constexpr,
           ROPE_LANES: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr,
           SPLIT: tl.constexpr, ALIGNED: tl.constexpr, SEGMENT: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """Lines of one batch row that share keys. SPLIT: one segment, whose results are stored by themselves; `ends` gets
    how many segments each token has."""
    row = tl.program_id(1)
    kv = tl.program_id(2) if not SPLIT else tl.program_id(2) % (heads // GROUP)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    length = tl.load(lengths + row)
    line = tl.program_id(0) * BM + tl.arange(0, BM)
    # 0. Triton 3.6 takes every multiple of an odd stride for aligned, and loads 8 bytes at once.
    nothing = tl.load(starts)
    if tl.program_id(0) * BM >= count * GROUP:
        return
    is_line = line < count * GROUP
    token = line // GROUP
    if SPLIT:
        segment_id = tl.program_id(2) // (heads // GROUP)
        if segment_id * SEGMENT >= length:
            return
        if tl.program_id(2) == 0:
            tl.store(ends + start + token, tl.cdiv(length, SEGMENT) + 0 * token, mask=is_line)
    head = kv * GROUP + line % GROUP
    position = length - count + token
    nearest = length - count + (tl.program_id(0) * BM) // GROUP
    furthest = tl.minimum(length - count + (tl.program_id(0) * BM + BM - 1) // GROUP, length - 1)
    # What any line of the tile sees, and each: [low, high).
    first = 0
    low = tl.zeros((BM,), tl.int32)
    last = length
    high = tl.zeros((BM,), tl.int32) + length
    if CAUSAL:
        last = furthest + 1
        high = position + 1
    if window is not None:
        first = tl.maximum(nearest - window + 1, 0)
        low = position - window + 1
        if not CAUSAL:
            last = tl.minimum(furthest + window, length)
            high = tl.minimum(position + window, length)
    if chunk is not None:
        first = nearest // chunk * chunk
        low = position // chunk * chunk
        if not CAUSAL:
            last = tl.minimum((furthest // chunk + 1) * chunk, length)
            high = tl.minimum((position // chunk + 1) * chunk, length)

    at = (start + token).to(tl.int64)
    lanes = tl.arange(0, LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    a = tl.load(q + at[:, None] * q_n + head[:, None] * q_h + lanes[None, :],
                mask=is_line[:, None] & (lanes < SIZE)[None, :], other=0.0)  # fmt: skip
    if ROPE:
        rope_lanes = tl.arange(0, ROPE_LANES)
        a_rope = tl.load(q_rope + at[:, None] * rope_n + head[:, None] * rope_h + rope_lanes[None, :],
                         mask=is_line[:, None] & (rope_lanes < ROPE)[None, :], other=0.0)  # fmt: skip
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_line, other=0.0).to(tl.float32)
    own = None if static is None else static + kv * static_h
    below = None if static is None else own + static_part
    value_static = None if static is None else own + 2 * static_part
    value_below = None if static is None else own + 3 * static_part
    keys += kv.to(tl.int64) * keys_h
    values += kv.to(tl.int64) * values_h
    ones = tl.full((BN, LEAST_TILE), 1.0, a.dtype)

    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, VALUE_LANES), tl.float32)
    begin = first // SEGMENT
    end = tl.cdiv(last, SEGMENT)
    if SPLIT:
        begin = tl.maximum(begin, segment_id)
        end = tl.minimum(end, segment_id + 1)
    for segment in range(begin, end):
        own_most = tl.full((BM,), float("-inf"), tl.float32)
        own_total = tl.zeros((BM, LEAST_TILE), tl.float32)
        own_out = tl.zeros((BM, VALUE_LANES), tl.float32)
        for key in range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, last), BN):
            place = key + tl.arange(0, BN)
            inside = (place >= first) & (place < last)
            block = tl.load(block_table + row.to(tl.int64) * table_r + place // block_size, mask=inside, other=0)
            slot = block * block_size + place % block_size
            # Offsets of 32 bits: pointers would take twice the registers.
            rows = slot * keys_s if ALIGNED else slot * keys_s + nothing
            b = _cached(keys, rows, lanes, inside, own, below, a.dtype, SIZE, KIND)
            scores = dot(a, tl.trans(b), tl.zeros((BM, BN), tl.float32))
            if KIND != "float":
                token_scale = _token_scales(keys, rows + (SIZE + ROPE), inside)
                scores = scores * token_scale[None, :]
            if ROPE:
                b = _cached(keys, rows + SIZE, rope_lanes, inside, None, None, a.dtype, ROPE, KIND)
                more = dot(a_rope, tl.trans(b), tl.zeros((BM, BN), tl.float32))
                scores += (
                    more * _token_scales(keys, rows + (SIZE + ROPE + 2), inside)[None, :] if KIND != "float" else more
                )
            scores = scores * scale
            if HAS_CAP:
                scores = tanh(tl.div_rn(scores, soft_cap)) * soft_cap
            if slopes is not None:
                scores += slope[:, None] * (place[None, :] - position[:, None]).to(tl.float32)
            seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None]) & inside[None, :]
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))
            new = tl.maximum(own_most, tl.max(scores, axis=1))
            # A NaN is not to be lost in a maximum.
            safe = tl.where(new == float("-inf"), 0.0, new)
            share = tl.exp2(own_most - safe)
            weights = tl.exp2(scores - safe[:, None])
            own_total = dot(rounded(weights, a.dtype), ones, own_total * share[:, None])
            rows = slot * values_s if ALIGNED else slot * values_s + nothing
            c = _cached(values, rows, value_lanes, inside, value_static, value_below, a.dtype, VALUE_SIZE, KIND)
            if KIND != "float" and static is None:
                weights = weights * _token_scales(values, rows + (SIZE + ROPE if ROPE else VALUE_SIZE), inside)[None, :]
            own_out = dot(rounded(weights, a.dtype), c, own_out * share[:, None])
            own_most = new
        # All columns of the product with ones are the sum.
        sums = tl.max(own_total, axis=1)
        if SPLIT:
            most, total, result = own_most, sums, own_out
        else:
            most, total, result = _merge(most, total, result, own_most, sums, own_out)
    inside = is_line[:, None] & (value_lanes < VALUE_SIZE)[None, :]
    if SPLIT:
        line_id = segment_id.to(tl.int64) * lines_in_all + at * heads + head
        tl.store(maxima + line_id, most, mask=is_line)
        tl.store(totals + line_id, total, mask=is_line)
        tl.store(parts + line_id[:, None] * VALUE_SIZE + value_lanes[None, :], result, mask=inside)
    else:
        result = _finish(most, total, result, sinks, head)
        to = out + (at[:, None] * heads + head[:, None]) * VALUE_SIZE + value_lanes[None, :]
        tl.store(to, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["lines_in_all"])
def merge_segments(parts, maxima, totals, ends, out, sinks, lines_in_all, heads, VALUE_SIZE: tl.constexpr,
                   VALUE_LANES: tl.constexpr):  # fmt: skip
    """What the segments of one line give, merged in order."""
    line = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lanes = tl.arange(0, VALUE_LANES)
    inside = (lanes < VALUE_SIZE)[None, :]
    most = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((1, VALUE_LANES), tl.float32)
    for segment in range(tl.load(ends + tl.program_id(0) // heads)):
        at = line + segment * lines_in_all.to(tl.int64)
        own = tl.load(parts + at[:, None] * VALUE_SIZE + lanes[None, :], mask=inside, other=0.0)
        most, total, result = _merge(most, total, result, tl.load(maxima + at), tl.load(totals + at), own)
    result = _finish(most, total, result, sinks, (line % heads).to(tl.int32))
    to = out + line[:, None] * VALUE_SIZE + lanes[None, :]
    tl.store(to, rounded(result, out.dtype.element_ty), mask=inside)


# --- What the host chooses. ---

_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.int8) if cache.dtype in QUANTIZED_CACHE_DTYPES else cache


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    static_scales: torch.Tensor | None = None,
) -> None:
    """See `kernels/reference/attention.py`."""
    kind = _KINDS.get(key_cache.dtype, "float")
    static = static_scales if kind != "float" else None
    keys, values = _as_bytes(key_cache), _as_bytes(value_cache)
    key, value = map(side_by_side, (key, value))
    part, head = (0, 0) if static is None else static.stride()[:2]
    size, value_size = key.shape[2], value.shape[2]
    launch(
        write_cache, (len(slot_mapping), key.shape[1]), key, value, keys, values, slot_mapping, static,
        *key.stride()[:2], *value.stride()[:2], *keys.stride()[:2], *values.stride()[:2], part, head, SIZE=size,
        VALUE_SIZE=value_size, KIND=kind, LANES=power_of_two(max(size, value_size)), device=key.device, num_warps=1,
    )  # fmt: skip


def write_latent_cache(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `kernels/reference/attention.py`."""
    rows = _as_bytes(cache.view(-1, cache.shape[-1]))
    size, rope_size = latent.shape[1], rope.shape[1]
    latent, rope = map(side_by_side, (latent, rope))
    launch(
        write_latents, (len(slot_mapping),), latent, rope, rows, slot_mapping, latent.stride(0), rope.stride(0),
        rows.stride(0), LATENT=size, ROPE=rope_size, KIND=_KINDS.get(cache.dtype, "float"), LANES=power_of_two(size),
        ROPE_LANES=power_of_two(rope_size), device=cache.device, num_warps=4,
    )  # fmt: skip


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
    """See `kernels/reference/attention.py`. The result has the type of the query."""
    scoring = (scale, soft_cap, sliding_window, None if sliding_window else attention_chunk, sinks, alibi_slopes)
    is_quantized = value_cache.dtype in QUANTIZED_CACHE_DTYPES
    width = value_cache.shape[2] - (SCALE_BYTES if is_quantized else 0)
    out = _attention(query, None, key_cache, value_cache, width, metadata, scoring, static_scales, causal)
    if out is not None:
        return out
    return definition.paged_attention(
        query, key_cache, value_cache, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
        attention_chunk=attention_chunk, sinks=sinks, alibi_slopes=alibi_slopes, static_scales=static_scales,
        causal=causal,
    )  # fmt: skip


def latent_attention(
    query: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, *, scale: float
) -> torch.Tensor:
    """See `kernels/reference/attention.py`."""
    keys = cache.view(1, -1, cache.shape[-1])
    scoring = (scale, None, None, None, None, None)
    out = _attention(query, query_rope, keys, keys, query.shape[-1], metadata, scoring, None, True)
    return definition.latent_attention(query, query_rope, cache, metadata, scale=scale) if out is None else out


def _attention(
    query: torch.Tensor,
    rope: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    width: int,
    metadata: AttentionMetadata,
    scoring: tuple[Any, ...],
    static: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor | None:
    """None: PyTorch does it."""
    scale, soft_cap, window, chunk, sinks, slopes = scoring
    tokens, heads, size = query.shape
    kind = _KINDS.get(keys.dtype, "float")
    static = None if kind == "float" else static
    keys, values = _as_bytes(keys), _as_bytes(values)
    query = side_by_side(query)
    rope = None if rope is None else side_by_side(rope)
    group, rows = heads // keys.shape[0], len(metadata.seq_lens)
    lines = max(metadata.query_lens_list, default=0) * group
    tile = tile_of(target_of(query.device), lines, size, width, query.dtype, kind)
    if tile is None or max(keys.stride(0), values.stride(0)) >= 2**31:
        return None
    segments = -(-metadata.block_table.shape[1] * metadata.block_size // SEGMENT)
    programs = rows * keys.shape[0] * -(-lines // tile["BM"])
    split = segments > 1 and lines <= _FEW_LINES and programs < _MANY_PROGRAMS
    aligned = keys.stride(1) % 16 == 0 and values.stride(1) % 16 == 0
    # Of a recorded step, whose rows have at most so many tokens, some may have no row; they are computed on.
    make = torch.empty if sum(metadata.query_lens_list) == tokens else torch.zeros
    out = make(tokens, heads, width, dtype=query.dtype, device=query.device)
    parts = maxima = totals = ends = None
    if split:
        parts = torch.empty(segments, tokens * heads, width, dtype=torch.float32, device=query.device)
        maxima, totals = torch.empty(2, segments, tokens * heads, dtype=torch.float32, device=query.device)
        ends = torch.empty(tokens, dtype=torch.int32, device=query.device)
    grid = (-(-lines // tile["BM"]), rows, keys.shape[0] * (segments if split else 1))
    static_strides = (0, 0) if static is None else static.stride()[:2]
    rope_size, rope_strides = (0, (0, 0)) if rope is None else (rope.shape[2], rope.stride()[:2])
    launch(
        attend, grid, query, rope, keys, values, out, parts, maxima, totals, ends, metadata.block_table,
        metadata.query_start_loc, metadata.seq_lens, sinks, slopes, static, float(scale), float(soft_cap or 0.0),
        window, chunk, metadata.block_size, *query.stride()[:2], *rope_strides, *keys.stride()[:2],
        *values.stride()[:2], metadata.block_table.stride(0), heads, tokens * heads, *static_strides,
        GROUP=group, SIZE=size, VALUE_SIZE=width, ROPE=rope_size, LANES=power_of_two(size),
        VALUE_LANES=power_of_two(width), ROPE_LANES=power_of_two(rope_size), KIND=kind, CAUSAL=causal,
        HAS_CAP=soft_cap is not None, SPLIT=split, ALIGNED=aligned, SEGMENT=SEGMENT, **tile, device=query.device,
    )  # fmt: skip
    if split:
        launch(
            merge_segments, (tokens * heads,), parts, maxima, totals, ends, out, sinks, tokens * heads, heads,
            VALUE_SIZE=width, VALUE_LANES=power_of_two(width), device=query.device, num_warps=1 if width <= 128 else 4,
        )  # fmt: skip
    return out


def tile_of(target: Target, lines: int, size: int, width: int, dtype: torch.dtype, kind: str) -> dict[str, int] | None:
    """Lines and keys of a tile, and warps and stages; None: there are too few registers.

    Keys, and the kind of matrix instruction, are functions of the sizes and types of heads: the order of sums is
    theirs.
    """
    largest = max(power_of_two(size), power_of_two(width))
    is_wide = dtype == torch.float32 or kind != "float"
    too_large = 512 if target.api == "hip" else 1024
    if target.is_rdna:
        too_large = (128 if dtype == torch.float32 else 256) if is_wide else 512
    if largest >= too_large and (is_wide or largest > 512 or target.is_rdna):
        return None
    keys = 16 if largest > 128 or target.is_rdna or is_wide else 32
    if dtype == torch.float32 or largest > 256 or target.is_rdna or (is_wide and largest == 256):
        rows = 16
    else:
        rows = max(target.least_rows, min(power_of_two(lines), 32))
    most = 2048 if target.is_rdna else 4096
    return {"BM": rows, "BN": keys, "num_warps": 8 if rows * largest > most else 4, "num_stages": 1}


kv_cache_shapes = definition.kv_cache_shapes
