"""Products with weights: quantizing activations, the GEMM for every kind of weight, products with a matrix per head.

A weight is stored as `kernels/reference/linear.py` packs it: plain rows, two int4 in a byte.

The order of a sum over K is that of blocks of BK columns, in segments whose sums are added in order. Both are functions
of the outputs of the whole matrix, K and the types (`form_of`), never of the number of rows M or of the outputs of a
rank, which choose the other sides of a tile. With few rows a program takes one segment, and `merge_segments` adds them;
with many it takes all, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import triton
import triton.language as tl
from llm.kernels.reference import linear as definition
from llm.kernels.reference.linear import add_products, check_slots, tokens_of
from llm.kernels.triton.language import dot, dot_int8, from_float8, int8_codes, nibbles, rounded, whole
from llm.kernels.triton.launch import KIB, PROGRAMS, Target, launch, power_of_two, side_by_side, target_of
from llm.kernels.weight import LEAST, LoraTerms, Weight

# A program quantizes so many columns at a time.
_MOST_AT_ONCE = 4096
# And rotates so many.
_ROTATED_AT_ONCE = 1024
# Groups up to this are a block of K of integer products with a scale for each.
_LARGEST_BLOCK = 256
# From so many rows on a program takes all segments of its outputs.
_MANY_ROWS = 128
# With fewer tiles of 64 outputs, those of float weights have 32.
_FEW_TILES = 132
# As many as keep most of a card's multiprocessors busy.
_ENOUGH_TILES = 105
# Columns of a segment, at least: adding segments costs less than it gains.
_LEAST_SEGMENT = 512
# From so many rows on a packed weight is unpacked once for all of them, not by each tile of rows.
UNPACKED_ROWS = 512
# So many bytes of it at a time.
_UNPACKED_BYTES = 128 << 20


@triton.jit
def _sums_and_differences(value, STRIDE: tl.constexpr):
    """Of lanes that are STRIDE apart, in their places."""
    pairs = value.reshape(value.shape[0] // (2 * STRIDE), 2, STRIDE).permute(0, 2, 1)
    first, second = tl.split(pairs)
    return tl.join(first + second, first - second).permute(0, 2, 1).reshape(value.shape[0])


@triton.jit
def rotate_rows(x, y, columns, stride_x, LOG2: tl.constexpr, SCALE: tl.constexpr, AT_ONCE: tl.constexpr):
    """A part of a row, rotated in blocks of 2^LOG2 columns by the sums of `kernels/reference/rotation.py`, in order."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    value = tl.load(x + row * stride_x + at, mask=at < columns, other=0.0).to(tl.float32)
    for shift in tl.static_range(4, LOG2):
        value = _sums_and_differences(value, 1 << shift)
    for shift in tl.static_range(4):
        value = _sums_and_differences(value, 1 << shift)
    tl.store(y + row * columns + at, rounded(value * SCALE, y.dtype.element_ty), mask=at < columns)


@triton.jit
def quantize_rows(x, q, scales, columns, groups, stride_x, static_scale, offset, SIZE: tl.constexpr,
                  AT_ONCE: tl.constexpr, STATIC: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """A group of a row: q = round(x / scale) + offset with scale = max|x| / 127, or the static one. A row that is not
    finite gets a scale that is not. HALVES: all even columns of a row, then the odd ones."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    lanes = tl.arange(0, AT_ONCE)
    largest = tl.zeros((AT_ONCE,), tl.float32)
    for start in range(0, SIZE, AT_ONCE):
        at = group * SIZE + start + lanes
        inside = (start + lanes < SIZE) & (at < columns)
        value = tl.abs(tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32))
        # A maximum may leave out a NaN.
        largest = tl.maximum(largest, tl.where(value == value, value, float("inf")))
    most = tl.max(largest, axis=0)
    if STATIC:
        scale = static_scale + 0.0 * most
        divisor = static_scale + 0.0 * tl.where(most == float("inf"), 0.0, most)
    else:
        scale = tl.div_rn(most, 127.0)
        divisor = tl.where(scale == 0.0, 1.0, scale)
    for start in range(0, SIZE, AT_ONCE):
        at = group * SIZE + start + lanes
        inside = (start + lanes < SIZE) & (at < columns)
        value = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
        quotient = tl.div_rn(value, divisor)
        if STATIC:
            # Cut before it is added to, so that it is a whole number below 2^22.
            quotient = whole(tl.minimum(tl.maximum(quotient, -512.0), 512.0)) + offset
        code = int8_codes(quotient)
        to = at // 2 + (at % 2) * (columns // 2) if HALVES else at
        tl.store(q + row * columns + to, code, mask=inside)
    tl.store(scales + row * groups + group, tl.where(scale == float("inf"), float("nan"), scale))


@triton.jit
def _level(codes, levels, rn, first, N, groups, COUNT: tl.constexpr):
    """int4 codes [BN, COUNT * width] of COUNT groups from `first` on, with two levels of scales -> int8."""
    rg = first + tl.arange(0, COUNT)
    inside = (rn < N)[:, None] & (rg < groups)[None, :]
    level = tl.load(levels + (rn.to(tl.int64)[:, None] * groups + rg[None, :]), mask=inside, other=0).to(tl.int32)
    step = level & 15
    shift = (step * ((level >> 4) + 16) * 5) >> 4
    value = codes.to(tl.int32).reshape(codes.shape[0], COUNT, codes.shape[1] // COUNT)
    return ((value + 8) * step[:, :, None] - shift[:, :, None]).to(tl.int8).reshape(codes.shape[0], codes.shape[1])


@triton.jit
def _values(codes, rn, rk, N, K, groups, group_size, scale, zero, minimum, table, LEAST_CODE: tl.constexpr):
    """What codes [BN, BK] of these rows and columns stand for, float32."""
    inside = (rn < N)[:, None] & (rk < K)[None, :]
    place = rn.to(tl.int64)[:, None] * groups + (rk // group_size)[None, :]
    factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
    if table is not None:
        return tl.load(table + (codes.to(tl.int32) + 8)) * factor
    elif minimum is not None:
        least = tl.load(minimum + place, mask=inside, other=0.0).to(tl.float32)
        return tl.fma(codes.to(tl.float32) + LEAST_CODE, factor, -least)
    elif zero is not None:
        return (codes.to(tl.float32) - tl.load(zero + place, mask=inside, other=0).to(tl.float32)) * factor
    else:
        return codes.to(tl.float32) * factor


@triton.jit
def _of_groups(codes, rn, first, N, groups, scale, zero, minimum, COUNT: tl.constexpr, LEAST_CODE: tl.constexpr):
    """What codes [BN, COUNT * width], of whole groups from `first` on, stand for, float32."""
    rg = first + tl.arange(0, COUNT)
    inside = (rn < N)[:, None] & (rg < groups)[None, :]
    place = rn.to(tl.int64)[:, None] * groups + rg[None, :]
    factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    value = codes.to(tl.float32).reshape(codes.shape[0], COUNT, codes.shape[1] // COUNT)
    if minimum is not None:
        least = tl.load(minimum + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        value = tl.fma(value + LEAST_CODE, tl.broadcast_to(factor, value.shape), -tl.broadcast_to(least, value.shape))
    elif zero is not None:
        value = (value - tl.load(zero + place, mask=inside, other=0).to(tl.float32)[:, :, None]) * factor
    else:
        value = value * factor
    return value.reshape(codes.shape[0], codes.shape[1])


@triton.jit
def _unpacked(codes, rn, k, N, groups, group_size, scale, zero, minimum, levels, KIND: tl.constexpr,
              BLOCK_GROUPS: tl.constexpr, LEAST_CODE: tl.constexpr):  # fmt: skip
    """Codes [BN, BK] of the columns from k on as a product takes them, where groups do not cut a block."""
    if levels is not None:
        return _level(codes, levels, rn, k // group_size, N, groups, BLOCK_GROUPS)
    elif BLOCK_GROUPS > 0:
        value = from_float8(codes) if KIND == "float8" else codes
        return _of_groups(value, rn, k // group_size, N, groups, scale, zero, minimum, BLOCK_GROUPS, LEAST_CODE)
    elif KIND == "float8":
        return from_float8(codes)
    else:
        return codes


@triton.jit
def _of_rows(vector, WEIGHT_FIRST: tl.constexpr):
    """[BM] beside sums."""
    return vector[None, :] if WEIGHT_FIRST else vector[:, None]


@triton.jit
def _of_outputs(vector, WEIGHT_FIRST: tl.constexpr):
    """[BN] beside sums."""
    return vector[:, None] if WEIGHT_FIRST else vector[None, :]


@triton.jit
def _product(x, w, sums, WEIGHT_FIRST: tl.constexpr):
    """sums + x w^T, or + w x^T: x [BM, BK], w [BN, BK]."""
    first = w if WEIGHT_FIRST else x
    second = x if WEIGHT_FIRST else w
    if x.dtype == tl.int8:
        return dot_int8(first, tl.trans(second), sums)
    else:
        return dot(first, tl.trans(second), sums)


@triton.jit
def _finish(sums, xs, scale, bias, rx, is_row, rn, N, WHOLE: tl.constexpr, STATIC: tl.constexpr,
            WEIGHT_FIRST: tl.constexpr):  # fmt: skip
    """Sums of the rows rx of x as outputs in float32: WHOLE, a scale for each row of the weight; then the
    bias."""
    value = sums.to(tl.float32)
    if WHOLE:
        factor = _of_outputs(tl.load(scale + rn, mask=rn < N, other=0.0).to(tl.float32), WEIGHT_FIRST)
        if xs is not None:
            row = _of_rows(tl.load(xs + rx, mask=is_row, other=0.0), WEIGHT_FIRST)
            value = value * (row * factor) if STATIC else (value * row) * factor
        else:
            value = value * factor
    if bias is not None:
        value = value + _of_outputs(tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32), WEIGHT_FIRST)
    return value


@triton.jit
def _tile(x, xs, w, scale, zero, minimum, table, levels, bias, y, rx, rm, is_row, rn, M, N, K, stride_x, stride_w,
          stride_y, groups, group_size, input_offset, KIND: tl.constexpr, INT8_X: tl.constexpr, IN_GROUPS: tl.constexpr,
          VALUES: tl.constexpr, BLOCK_GROUPS: tl.constexpr, WHOLE: tl.constexpr, STATIC: tl.constexpr,
          OFFSET: tl.constexpr, LEAST_CODE: tl.constexpr, HALVES: tl.constexpr, SEGMENTS: tl.constexpr,
          SEGMENT: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          WEIGHT_FIRST: tl.constexpr):  # fmt: skip
    """Outputs rn of the rows rx [BM] of x, where `is_row`, to the rows rm of y: y = x W^T + bias.

    IN_GROUPS: the sum of each block of K is scaled by itself. VALUES: codes become values before the product, each with
    parameters of its own, or BLOCK_GROUPS whole groups of a block with theirs. WHOLE: the whole sum is scaled. SPLIT:
    one segment of `SEGMENT` columns, whose sums go to y [SEGMENTS * M, N]. OFFSET: of static int8 activations.
    HALVES: x has all even columns, then the odd ones, as the low and the high nibbles of int4 are: each half has a
    product of its own, and no nibble has to move. xs: scales of rows, of int8 activations. WEIGHT_FIRST: sums are
    [BN, BM], else [BM, BN].
    """
    x_rows = x + rx.to(tl.int64)[:, None] * stride_x
    w_rows = w + rn.to(tl.int64)[:, None] * stride_w
    lanes = tl.arange(0, BK)
    shape: tl.constexpr = (BN, BM) if WEIGHT_FIRST else (BM, BN)
    total = tl.zeros(shape, tl.int32 if INT8_X and not IN_GROUPS else tl.float32)
    columns = tl.zeros((BN,), tl.int32)
    first = tl.program_id(1) if SPLIT else 0
    last = first + 1 if SPLIT else SEGMENTS
    for segment in range(first, last):
        sums = tl.zeros(shape, tl.int32 if INT8_X and not IN_GROUPS else tl.float32)
        for k in range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, K), BK):
            rk = k + lanes
            if KIND == "int4":
                half = k // 2 + tl.arange(0, BK // 2)
                packed = tl.load(w_rows + half[None, :], mask=(rn < N)[:, None] & (half < stride_w)[None, :], other=0)
            else:
                b = tl.load(w_rows + rk[None, :], mask=(rn < N)[:, None] & (rk < K)[None, :], other=0)
            if HALVES:
                inside = is_row[:, None] & (half < K // 2)[None, :]
                a = tl.load(x_rows + half[None, :], mask=inside, other=0)
                a_odd = tl.load(x_rows + (K // 2 + half)[None, :], mask=inside, other=0)
                b = (packed << 4) >> 4
                b_odd = packed >> 4
            else:
                a = tl.load(x_rows + rk[None, :], mask=is_row[:, None] & (rk < K)[None, :], other=0)
                if KIND == "int4":
                    b = nibbles(packed, BN, BK)
            b = _unpacked(b, rn, k, N, groups, group_size, scale, zero, minimum, levels, KIND, BLOCK_GROUPS, LEAST_CODE)
            if VALUES and BLOCK_GROUPS == 0:
                if HALVES:
                    b = _values(b, rn, half * 2, N, K, groups, group_size, scale, zero, minimum, table, LEAST_CODE)
                    b_odd = _values(b_odd, rn, half * 2 + 1, N, K, groups, group_size, scale, zero, minimum, table,
                                    LEAST_CODE)  # fmt: skip
                else:
                    b = _values(b, rn, rk, N, K, groups, group_size, scale, zero, minimum, table, LEAST_CODE)
            if not INT8_X:
                b = b if b.dtype == x.dtype.element_ty else rounded(b.to(tl.float32), x.dtype.element_ty)
                if HALVES:
                    b_odd = rounded(b_odd.to(tl.float32), x.dtype.element_ty)
            if IN_GROUPS:
                at = rn.to(tl.int64) * groups + k // group_size
                factor = tl.load(scale + at, mask=rn < N, other=0.0).to(tl.float32)
                if INT8_X:
                    part = _product(a, b, tl.zeros(shape, tl.int32), WEIGHT_FIRST)
                    if HALVES:
                        part = _product(a_odd, b_odd, part, WEIGHT_FIRST)
                    part = part.to(tl.float32)
                    row = tl.load(xs + rx.to(tl.int64) * groups + k // group_size, mask=is_row, other=0.0)
                    part *= _of_rows(row, WEIGHT_FIRST)
                    sums = tl.fma(part, tl.broadcast_to(_of_outputs(factor, WEIGHT_FIRST), shape), sums)
                    if zero is not None or minimum is not None:
                        if minimum is not None:
                            least = tl.load(minimum + at, mask=rn < N, other=0.0).to(tl.float32)
                            below = factor * LEAST_CODE - least
                        else:
                            below = 0.0 - tl.load(zero + at, mask=rn < N, other=0).to(tl.float32) * factor
                        inputs = tl.sum(a.to(tl.int32), axis=1)
                        if HALVES:
                            inputs += tl.sum(a_odd.to(tl.int32), axis=1)
                        inputs = row * inputs.to(tl.float32)
                        sums = tl.fma(tl.broadcast_to(_of_rows(inputs, WEIGHT_FIRST), shape),
                                      tl.broadcast_to(_of_outputs(below, WEIGHT_FIRST), shape), sums)  # fmt: skip
                else:
                    part = _product(a, b, tl.zeros(shape, tl.float32), WEIGHT_FIRST)
                    if HALVES:
                        part = _product(a_odd, b_odd, part, WEIGHT_FIRST)
                    sums = tl.fma(part, tl.broadcast_to(_of_outputs(factor, WEIGHT_FIRST), shape), sums)
            elif INT8_X:
                sums = _product(a, b, sums, WEIGHT_FIRST)
                if OFFSET:
                    columns += tl.sum(b.to(tl.int32), axis=1)
                if HALVES:
                    sums = _product(a_odd, b_odd, sums, WEIGHT_FIRST)
                    if OFFSET:
                        columns += tl.sum(b_odd.to(tl.int32), axis=1)
            else:
                sums = _product(a, b, sums, WEIGHT_FIRST)
                if HALVES:
                    sums = _product(a_odd, b_odd, sums, WEIGHT_FIRST)
        total = total + sums if SEGMENTS > 1 and not SPLIT else sums
    if OFFSET:
        total = total - input_offset * _of_outputs(columns, WEIGHT_FIRST)
    inside = _of_rows(is_row, WEIGHT_FIRST) & _of_outputs(rn < N, WEIGHT_FIRST)
    if SPLIT:
        to = tl.program_id(1).to(tl.int64) * M + rm
        at = _of_rows(to * stride_y, WEIGHT_FIRST) + _of_outputs(rn, WEIGHT_FIRST)
        tl.store(y + at, total, mask=inside)
    else:
        value = _finish(total, xs, scale, bias, rx, is_row, rn, N, WHOLE, STATIC, WEIGHT_FIRST)
        at = _of_rows(rm.to(tl.int64) * stride_y, WEIGHT_FIRST) + _of_outputs(rn, WEIGHT_FIRST)
        tl.store(y + at, rounded(value, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def gemm(x, xs, w, scale, zero, minimum, table, levels, bias, y, M, N, K, stride_x, stride_w, stride_y, groups,
         group_size, input_offset, KIND: tl.constexpr, INT8_X: tl.constexpr, IN_GROUPS: tl.constexpr,
         VALUES: tl.constexpr, BLOCK_GROUPS: tl.constexpr, WHOLE: tl.constexpr, STATIC: tl.constexpr,
         OFFSET: tl.constexpr, LEAST_CODE: tl.constexpr, HALVES: tl.constexpr, SEGMENTS: tl.constexpr,
         SEGMENT: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         WEIGHT_FIRST: tl.constexpr):  # fmt: skip
    """y[M, N] = x[M, K] W[N, K]^T + bias."""
    tiles_n = tl.cdiv(N, BN)
    # Eight tiles of rows share the tiles of the weight that the cache has.
    per_band = 8 * tiles_n
    band = tl.program_id(0) // per_band
    rows_of_band = tl.minimum(tl.cdiv(M, BM) - band * 8, 8)
    place = tl.program_id(0) % per_band
    rm = (band * 8 + place % rows_of_band) * BM + tl.arange(0, BM)
    rn = (place // rows_of_band) * BN + tl.arange(0, BN)
    _tile(x, xs, w, scale, zero, minimum, table, levels, bias, y, rm, rm, rm < M, rn, M, N, K, stride_x, stride_w,
          stride_y, groups, group_size, input_offset, KIND, INT8_X, IN_GROUPS, VALUES, BLOCK_GROUPS, WHOLE, STATIC,
          OFFSET, LEAST_CODE, HALVES, SEGMENTS, SEGMENT, SPLIT, BM, BN, BK, WEIGHT_FIRST)  # fmt: skip


@triton.jit(do_not_specialize=["E"])
def experts_gemm(x, xs, w, scale, zero, minimum, table, levels, bias, y, offsets, starts, order, E, N, K, stride_x,
                 stride_w, groups, group_size, input_offset, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
                 ALIGNED: tl.constexpr, KIND: tl.constexpr, INT8_X: tl.constexpr, IN_GROUPS: tl.constexpr,
                 VALUES: tl.constexpr, BLOCK_GROUPS: tl.constexpr, WHOLE: tl.constexpr, STATIC: tl.constexpr,
                 OFFSET: tl.constexpr, LEAST_CODE: tl.constexpr, HALVES: tl.constexpr, SEGMENTS: tl.constexpr,
                 SEGMENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 WEIGHT_FIRST: tl.constexpr):  # fmt: skip
    """The products of all experts. Places are sorted by expert, those of expert e are starts[e] to starts[e + 1] - 1;
    order[place] is a slot of a token, token * SLOTS + slot. SLOTS > 0: x has a row for each token, y for each place.
    0: x has a row for each place, y for each slot of a token.

    w, scale ... are of expert 0, offsets [7, E] says how many elements further on those of expert e are. EXPERTS: a
    power of two, at least E. ALIGNED: 16 divides the offsets of w.
    """
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0) // tiles_n
    re = tl.arange(0, EXPERTS)
    begins = tl.load(starts + re, mask=re < E, other=0)
    counts = tl.load(starts + re + 1, mask=re < E, other=0) - begins
    tiles = (counts + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert >= E:
        return
    own = re == expert
    within = tile - tl.sum(tl.where(own, ends - tiles, 0), 0)
    place = tl.sum(tl.where(own, begins, 0), 0) + within * BM + tl.arange(0, BM)
    is_row = within * BM + tl.arange(0, BM) < tl.sum(tl.where(own, counts, 0), 0)
    slot = tl.load(order + place, mask=is_row, other=0)
    at = tl.load(offsets + expert)
    w += tl.multiple_of(at, 16) if ALIGNED else at
    if scale is not None:
        scale += tl.load(offsets + E + expert)
    if zero is not None:
        zero += tl.load(offsets + 2 * E + expert)
    if minimum is not None:
        minimum += tl.load(offsets + 3 * E + expert)
    if table is not None:
        table += tl.load(offsets + 4 * E + expert)
    if levels is not None:
        levels += tl.load(offsets + 5 * E + expert)
    if bias is not None:
        bias += tl.load(offsets + 6 * E + expert)
    rn = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    rx = slot // SLOTS if SLOTS else place
    rm = place if SLOTS else slot
    _tile(x, xs, w, scale, zero, minimum, table, levels, bias, y, rx, rm, is_row, rn, 0, N, K, stride_x, stride_w,
          N, groups, group_size, input_offset, KIND, INT8_X, IN_GROUPS, VALUES, BLOCK_GROUPS, WHOLE, STATIC, OFFSET,
          LEAST_CODE, HALVES, SEGMENTS, SEGMENT, False, BM, BN, BK, WEIGHT_FIRST)  # fmt: skip


@triton.jit
def unpack(w, scale, zero, minimum, levels, y, N, K, stride_w, groups, group_size, KIND: tl.constexpr,
           BLOCK_GROUPS: tl.constexpr, LEAST_CODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A tile of a weight as `_tile` multiplies it -> y [N, K], int8 or of the activations' type."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK
    rk = k + tl.arange(0, BK)
    rows = w + rn.to(tl.int64)[:, None] * stride_w
    if KIND == "int4":
        half = k // 2 + tl.arange(0, BK // 2)
        packed = tl.load(rows + half[None, :], mask=(rn < N)[:, None] & (half < stride_w)[None, :], other=0)
        codes = nibbles(packed, BN, BK)
    else:
        codes = tl.load(rows + rk[None, :], mask=(rn < N)[:, None] & (rk < K)[None, :], other=0)
    value = _unpacked(codes, rn, k, N, groups, group_size, scale, zero, minimum, levels, KIND, BLOCK_GROUPS, LEAST_CODE)
    if value.dtype != y.dtype.element_ty:
        value = rounded(value.to(tl.float32), y.dtype.element_ty)
    at = rn.to(tl.int64)[:, None] * K + rk[None, :]
    tl.store(y + at, value, mask=(rn < N)[:, None] & (rk < K)[None, :])


@triton.jit(do_not_specialize=["M"])
def merge_segments(parts, xs, scale, bias, y, M, N, WHOLE: tl.constexpr, STATIC: tl.constexpr, SEGMENTS: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    """The sums of segments, float32 or int32 [SEGMENTS, M, N], added in order -> y [M, N]."""
    rm = tl.program_id(0) + tl.arange(0, 1)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    at = rm.to(tl.int64)[:, None] * N + rn[None, :]
    total = tl.zeros((1, BN), parts.dtype.element_ty)
    for segment in range(SEGMENTS):
        total += tl.load(parts + (segment * M).to(tl.int64) * N + at, mask=inside, other=0)
    value = _finish(total, xs, scale, bias, rm, rm < M, rn, N, WHOLE, STATIC, False)
    tl.store(y + at, rounded(value, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def heads_product(x, w, y, N, K, WIDTH, heads, stride_n, stride_h, w_h, w_k, w_n, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """y[t, h] = x[t, h] W_h: x [N, heads, K], W of any strides, y [N, heads, WIDTH]."""
    head = tl.program_id(2)
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(x + rm.to(tl.int64)[:, None] * stride_n + head * stride_h + rk[None, :],
                    mask=(rm < N)[:, None] & (rk < K)[None, :], other=0.0)  # fmt: skip
        b = tl.load(w + head.to(tl.int64) * w_h + rk[:, None] * w_k + rn[None, :] * w_n,
                    mask=(rk < K)[:, None] & (rn < WIDTH)[None, :], other=0.0)  # fmt: skip
        b = b if b.dtype == a.dtype else rounded(b.to(tl.float32), a.dtype)
        sums = dot(a, b, sums)
    at = (rm.to(tl.int64)[:, None] * heads + head) * WIDTH + rn[None, :]
    tl.store(y + at, rounded(sums, y.dtype.element_ty), mask=(rm < N)[:, None] & (rn < WIDTH)[None, :])


# --- What the host chooses. ---


class Form(NamedTuple):
    """How a weight is multiplied; constants of `gemm`, by the weight's `outputs`, K and types alone.

    Attributes:
        BK: columns of a block. SEGMENTS: sums that are added in order, of `SEGMENT` columns each.
    """

    KIND: str
    INT8_X: bool
    IN_GROUPS: bool
    VALUES: bool
    WHOLE: bool
    STATIC: bool
    OFFSET: bool
    LEAST_CODE: int
    HALVES: bool
    BLOCK_GROUPS: int
    SEGMENTS: int
    SEGMENT: int
    BK: int

    @property
    def is_packed(self) -> bool:
        """True if unpacking takes long, and values that are unpacked before have the same sums."""
        return self.BLOCK_GROUPS > 0 and not (self.IN_GROUPS or self.HALVES)

    def unpacked(self) -> Form:
        """Of those values."""
        kind = "int8" if self.INT8_X else "float"
        return self._replace(KIND=kind, VALUES=False, BLOCK_GROUPS=0, LEAST_CODE=0)

    def as_one_segment(self, k: int) -> Form:
        """Of sums of integers, which are exact in any order."""
        return self._replace(SEGMENTS=1, SEGMENT=-(-k // self.BK) * self.BK)


def form_of(weight: Weight, dtype: torch.dtype) -> Form | None:
    """How activations of `dtype` are multiplied with `weight`; None: PyTorch does it."""
    int8_x, size, whole = weight.activations == "int8", weight.group_size, weight.groups == 1
    shifted = any(part is not None for part in (weight.zero, weight.minimum, weight.table))
    block = 16 if dtype == torch.float32 and not int8_x else 64
    in_groups = values = False
    block_groups = 0
    if weight.is_float:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        whole, block = False, block if dtype == torch.float32 else 128
    elif int8_x and weight.kind == "int4" and weight.levels is None and (weight.groups > 1 or shifted):
        block = power_of_two(size, 32)
        if block != size or block > _LARGEST_BLOCK:
            return None
        in_groups, whole = True, False
    elif weight.levels is not None:
        if size not in (32, 64, 128, 256):
            return None
        whole, block, block_groups = True, 128, max(1, 128 // size)
    elif int8_x:
        whole, block = True, 128
    elif dtype != torch.float32 and weight.groups > 1 and weight.table is None and size in (32, 64, 128, 256):
        values, whole, block = True, False, 128
        block_groups = max(1, block // size)
    elif shifted or (weight.groups > 1 and _dividing(size, block) < min(32, block)):
        values, whole = True, False
    elif weight.groups > 1:
        block, in_groups, whole = _dividing(size, block), True, False
    segments = (
        1 if int8_x and in_groups else _segments(weight.outputs or weight.n, weight.k, 32 if weight.is_float else 64)
    )
    length = -(-weight.k // segments)
    length = max(block, -(-length // block) * block)
    return Form(
        KIND="float" if weight.is_float else weight.kind,
        INT8_X=int8_x,
        IN_GROUPS=in_groups,
        VALUES=values,
        WHOLE=whole,
        STATIC=bool(weight.input_scale),
        OFFSET=bool(weight.input_offset),
        LEAST_CODE=LEAST.get(weight.kind, 0),
        BLOCK_GROUPS=block_groups,
        # Groups are cut by whole columns; there the nibbles are moved.
        HALVES=weight.kind == "int4" and weight.k % 2 == 0 and block >= (64 if int8_x else 32) and not block_groups,
        SEGMENTS=max(1, -(-weight.k // length)),
        SEGMENT=length,
        BK=block,
    )


def _segments(n: int, k: int, outputs: int) -> int:
    """Segments of K: enough programs of so many outputs for one row, of at least `_LEAST_SEGMENT` columns each.

    Float weights need no more than the memory does, and with many rows segments cost registers; unpacking needs all.
    """
    wanted = (PROGRAMS if outputs > 32 else PROGRAMS // 2) // max(1, -(-n // outputs))
    return max(1, min(wanted, k // _LEAST_SEGMENT, 16))


def _dividing(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


class _Tile(NamedTuple):
    """A tile of Hopper's, as `gemm` takes it; `BK`: less than the form's, 0: the form's."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    WEIGHT_FIRST: bool = True
    BK: int = 0


# The fastest of those tried on an H100, the largest first. The first matrix of a product has 64 rows at least, the
# second 16: so with few rows the weight is the first. In some sizes it had better be unpacked to shared memory, as the
# second. Neither that nor the number of columns of a block changes a sum there: the matrix instructions are the same,
# in the same order.
_TILES: dict[str, tuple[_Tile, ...]] = {
    "float": (
        *(_Tile(256, 128, 8, 4, BK=64), _Tile(128, 64, 4, 4, BK=64)),
        *(_Tile(64, 64, 4, 4), _Tile(32, 64, 4, 4), _Tile(16, 64, 4, 4)),
    ),
    "float in segments": (
        *(_Tile(128, 128, 8, 4, BK=64), _Tile(128, 64, 4, 4, BK=64)),
        *(_Tile(64, 64, 4, 4), _Tile(32, 64, 4, 4), _Tile(16, 64, 4, 4)),
    ),
    "integers": (
        *(_Tile(128, 128, 8, 3), _Tile(128, 64, 4, 3)),
        *(_Tile(64, 64, 4, 3), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)),
    ),
    "unpacked to integers": (
        *(_Tile(256, 64, 4, 3), _Tile(128, 64, 4, 3)),
        *(_Tile(64, 64, 4, 3), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)),
    ),
    "int8 to floats": (
        *(_Tile(256, 128, 8, 3), _Tile(128, 128, 4, 3, False)),
        *(_Tile(64, 128, 4, 3, False), _Tile(64, 64, 4, 3, False), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)),
    ),
    "int4 to floats": (
        *(_Tile(256, 128, 8, 3), _Tile(128, 256, 8, 3, False), _Tile(128, 128, 8, 3, False)),
        *(_Tile(64, 128, 8, 3, False), _Tile(64, 64, 4, 3, False)),
        *(_Tile(32, 128, 8, 3), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)),
    ),
}


def tile_of(target: Target, m: int, n: int, form: Form, dtype: torch.dtype) -> dict[str, int]:
    """Rows and outputs of a tile, and warps and stages, by the number of rows m; what else of the form it changes."""
    by_blocks = form.IN_GROUPS or (form.VALUES and not form.BLOCK_GROUPS)
    is_float32 = dtype == torch.float32 and not form.INT8_X
    if target.arch == 90 and not by_blocks and not is_float32:
        return _hopper_tile(m, n, form)
    most = 64 if target.is_rdna else 128
    rows = min(max(target.least_rows, power_of_two(m)), most)
    outputs = 64
    # What is unpacked takes registers beside those of the sums, where a matrix instruction does not read shared memory.
    unpacks, has_room = form.KIND != "float" and not form.INT8_X, target.shared > 200 * KIB
    if is_float32:  # no tensor core: every thread has its operands in registers
        rows, outputs = min(rows, 32), 32
    elif (form.VALUES and not (form.BLOCK_GROUPS and has_room)) or form.IN_GROUPS:
        rows = min(rows, most // 2)
    elif form.BLOCK_GROUPS and unpacks:
        is_many = rows == 128 and form.SEGMENTS == 1
        outputs = 256 if is_many else 128 if rows == 128 or n >= 64 * _FEW_TILES else 64
    elif rows == 128 and not target.is_small and (has_room or not unpacks):
        outputs = 128
    elif form.KIND == "float" and -(-n // outputs) * form.SEGMENTS < _FEW_TILES:
        outputs = 32  # a program on each multiprocessor
    outputs = min(outputs, power_of_two(n))
    size = 1 if form.INT8_X else dtype.itemsize
    weights = 1 if form.BLOCK_GROUPS else size
    if form.VALUES and not form.BLOCK_GROUPS:  # scales and zero points of every column wait in shared memory too
        weights += 12
    stages = target.shared // ((rows * size + outputs * weights) * form.BK)
    stages = 2 if target.api == "hip" else max(1, min(stages, 3 if form.BK > 64 else 4))
    is_wide = rows * outputs > 64 * 128 and (form.KIND == "float" or target.api == "hip")
    is_wide |= form.BLOCK_GROUPS > 0 and outputs > 64 and not form.INT8_X
    return {"BM": rows, "BN": outputs, "num_warps": 8 if is_wide else 4, "num_stages": stages, "WEIGHT_FIRST": False}


def _hopper_tile(m: int, n: int, form: Form) -> dict[str, int]:
    """The largest tile of which there are enough, of no more rows than there are."""
    if form.INT8_X:
        kind = "unpacked to integers" if form.KIND == "int4" else "integers"
    elif form.KIND == "float":
        kind = "float" if form.SEGMENTS == 1 else "float in segments"
    else:
        kind = "int4 to floats" if form.KIND == "int4" else "int8 to floats"
    rows, split = power_of_two(m), form.SEGMENTS if m < _MANY_ROWS else 1
    # Sums of segments need as many registers again.
    most = 256 * 128 if split > 1 or form.SEGMENTS == 1 else 128 * 128
    fitting = [tile for tile in _TILES[kind] if rows >= tile.BM and most >= tile.BM * tile.BN]
    # With few rows all of them are in one tile: in two, weights would be read twice.
    fitting = [tile for tile in fitting if rows == tile.BM or rows > 64]
    enough = (tile for tile in fitting if -(-m // tile.BM) * -(-n // tile.BN) * split >= _ENOUGH_TILES)
    tile = next(enough, fitting[-1] if rows <= 64 else next(tile for tile in fitting if tile.BM == 64))
    options = tile._asdict()
    return options if tile.BK else {key: value for key, value in options.items() if key != "BK"}


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/reference/linear.py`."""
    q, scales = quantize(x, max(1, x.shape[-1]))
    return q, scales.view(-1)


def quantize(
    x: torch.Tensor, size: int, static_scale: float = 0.0, offset: int = 0, halves: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], each group of `size` columns by its largest or by the static scale -> (int8 [M, K], float32 [M, G]).
    `halves`: of the codes the even columns come first, then the odd ones."""
    rows, columns = x.shape
    groups = max(1, -(-columns // size))
    q = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    x = side_by_side(x)
    launch(
        quantize_rows, (rows, groups), x, q, scales, columns, groups, x.stride(0), float(static_scale), offset,
        SIZE=size, AT_ONCE=min(_MOST_AT_ONCE, power_of_two(size)), STATIC=static_scale > 0, HALVES=halves,
        device=x.device, num_warps=4,
    )  # fmt: skip
    return q, scales


def rotate(x: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """x [M, K] rotated in blocks of so many columns, in this type; see `kernels/reference/rotation.py`."""
    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=dtype, device=x.device)
    x = side_by_side(x)
    launch(
        rotate_rows, (rows, -(-columns // _ROTATED_AT_ONCE)), x, y, columns, x.stride(0), LOG2=block.bit_length() - 1,
        SCALE=1 / math.sqrt(block), AT_ONCE=_ROTATED_AT_ONCE, device=x.device, num_warps=4,
    )  # fmt: skip
    return y


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """See `kernels/reference/linear.py`. The result has the type of x."""
    form = form_of(weight, x.dtype) if x.dim() and x.shape[-1] == weight.k and weight.n and weight.k else None
    if form is None:
        return definition.linear(x, weight)
    rows, scales = _inputs(x.reshape(-1, weight.k), weight, form)
    out = torch.empty(len(rows), weight.n, dtype=x.dtype, device=x.device)
    if len(rows):
        multiply(rows, scales, weight, form, out)
    return out.view(*x.shape[:-1], weight.n)


def _inputs(rows: torch.Tensor, weight: Weight, form: Form) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activations [M, K] as they are multiplied, and the scales of their rows if those are integers."""
    dtype = rows.dtype
    if weight.columns is not None:
        rows = rows[:, weight.columns.long()]
    if weight.rotation:
        rows = rotate(rows, weight.rotation, torch.float32 if form.INT8_X else dtype)
    if weight.activations == "bfloat16":
        rows = rows.bfloat16().to(dtype)
    if form.INT8_X:
        size = weight.group_size if form.IN_GROUPS else weight.k
        return quantize(rows, size, weight.input_scale, weight.input_offset, form.HALVES)
    if form.HALVES:
        rows = rows.reshape(len(rows), -1, 2).transpose(1, 2).reshape(len(rows), -1)
    return side_by_side(rows), None


def multiply(x: torch.Tensor, xs: torch.Tensor | None, weight: Weight, form: Form, out: torch.Tensor) -> None:
    """Rows x [M, K], as they are multiplied, times the weight -> out [M, N]."""
    form = form if not form.INT8_X or form.IN_GROUPS or _is_split(len(x), form) else form.as_one_segment(weight.k)
    parts = _parts(weight)
    if len(x) < UNPACKED_ROWS or not form.is_packed or x.dtype == torch.float32:
        _multiply(x, xs, parts, form, out, (weight.groups, weight.group_size, weight.input_offset))
        return
    # The same values in the same order as those that tiles unpack for themselves.
    at_once = max(256, _UNPACKED_BYTES // (weight.k * x.itemsize) // 256 * 256)
    values = torch.empty(min(at_once, weight.n), weight.k, dtype=x.dtype, device=x.device)
    for start in range(0, weight.n, at_once):
        own = slice(start, start + at_once)
        data, *others = parts
        data, (scale, zero, minimum, _, levels, bias) = (
            data[own],
            [item if item is None else item[own] for item in others],
        )
        launch(
            unpack, (-(-len(data) // 64), -(-weight.k // form.BK)), data, scale, zero, minimum, levels, values,
            len(data), weight.k, data.stride(0), weight.groups, weight.group_size, KIND=form.KIND,
            BLOCK_GROUPS=form.BLOCK_GROUPS, LEAST_CODE=form.LEAST_CODE, BN=64, BK=form.BK, device=x.device, num_warps=4,
        )  # fmt: skip
        plain = _Parts(values[: len(data)], scale, None, None, None, None, bias)
        _multiply(x, xs, plain, form.unpacked(), out[:, own], (1, 0, weight.input_offset))


def _is_split(m: int, form: Form) -> bool:
    return form.SEGMENTS > 1 and m < _MANY_ROWS


def _multiply(
    x: torch.Tensor,
    xs: torch.Tensor | None,
    parts: _Parts,
    form: Form,
    out: torch.Tensor,
    numbers: tuple[int, int, int],
) -> None:
    """`numbers`: groups, group_size and input_offset of the weight."""
    (m, k), n = x.shape, out.shape[1]
    tile, split = tile_of(target_of(x.device), m, n, form, x.dtype), _is_split(m, form)
    tiles = -(-m // tile["BM"]) * -(-n // tile["BN"])
    sums = out
    if split:
        dtype = torch.int32 if form.INT8_X and not form.IN_GROUPS else torch.float32
        sums = torch.empty(form.SEGMENTS * m, n, dtype=dtype, device=x.device)
    launch(
        gemm, (tiles, form.SEGMENTS if split else 1), x, xs, *parts, sums, m, n, k, x.stride(0), parts.data.stride(0),
        sums.stride(0), *numbers, SPLIT=split, **form._asdict() | tile, device=x.device,
    )  # fmt: skip
    if split:
        launch(
            merge_segments, (m, -(-n // 256)), sums, xs, parts.scale, parts.bias, out, m, n, WHOLE=form.WHOLE,
            STATIC=form.STATIC, SEGMENTS=form.SEGMENTS, BN=256, device=x.device, num_warps=4,
        )  # fmt: skip


class _Parts(NamedTuple):
    """What the kernels read of a weight, in the order of their arguments."""

    data: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    minimum: torch.Tensor | None
    table: torch.Tensor | None
    levels: torch.Tensor | None
    bias: torch.Tensor | None


def _parts(weight: Weight) -> _Parts:
    data = weight.data.view(torch.int8) if weight.kind in ("float8", "int4") else weight.data
    return _Parts(data, weight.scale, weight.zero, weight.minimum, weight.table, weight.levels, weight.bias)


class Together(NamedTuple):
    """Weights of experts that one launch multiplies with.

    Attributes:
        first: of expert 0.
        offsets: int64 [7, E], from each part of `first` to the same part of expert e, in elements.
        is_aligned: 16 divides those of the data.
    """

    first: Weight
    offsets: torch.Tensor
    is_aligned: bool


def together(weights: Sequence[Weight]) -> Together | None:
    """None: they are not of one form, or not on one device."""
    first = weights[0]

    def form(weight: Weight) -> tuple[object, ...]:
        parts = [part if part is None else (part.dtype, part.device, part.stride()) for part in _parts(weight)]
        own = (weight.activations, weight.input_scale, weight.input_offset, weight.rotation)
        return weight.kind, weight.n, weight.k, weight.group_size, *own, *parts

    if any(weight.columns is not None or form(weight) != form(first) for weight in weights):
        return None
    rows = []
    for each in zip(*map(_parts, weights), strict=True):
        addresses = [0 if part is None else part.data_ptr() for part in each]
        size = 1 if each[0] is None else each[0].itemsize
        if any((address - addresses[0]) % size for address in addresses):
            return None
        rows.append([(address - addresses[0]) // size for address in addresses])
    return Together(first, torch.tensor(rows, device=first.data.device), all(at % 16 == 0 for at in rows[0]))


def multiply_experts(
    x: torch.Tensor, weights: Together, form: Form, starts: torch.Tensor, order: torch.Tensor, slots: int
) -> torch.Tensor:
    """Rows x times the weights of their experts -> [places, N]; see `experts_gemm`. No number is read on the host."""
    weight, experts, places = weights.first, weights.offsets.shape[1], len(order)
    rows, scales = _inputs(x, weight, form)
    out = torch.empty(places, weight.n, dtype=x.dtype, device=x.device)
    if form.INT8_X and not form.IN_GROUPS:  # exact in any order
        form = form.as_one_segment(weight.k)
    busy = max(1, min(experts, places))
    tile = tile_of(target_of(x.device), -(-places // busy), weight.n, form, x.dtype)
    tiles = (places // tile["BM"] + busy) * -(-weight.n // tile["BN"])
    launch(
        experts_gemm, (tiles,), rows, scales, *_parts(weight), out, weights.offsets, starts, order, experts, weight.n,
        weight.k, rows.stride(0), weight.data.stride(0), weight.groups, weight.group_size, weight.input_offset,
        EXPERTS=power_of_two(experts), SLOTS=slots, ALIGNED=weights.is_aligned, **form._asdict() | tile,
        device=x.device,
    )  # fmt: skip
    return out


def heads_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `kernels/reference/attention.py`."""
    count, heads, size = x.shape
    width = weight.shape[2]
    out = torch.empty(count, heads, width, dtype=x.dtype, device=x.device)
    x = side_by_side(x)
    rows = min(max(target_of(x.device).least_rows, power_of_two(count)), 64)
    options: dict[str, Any] = {"BM": rows, "BN": min(64, power_of_two(width)), "BK": 32, "num_warps": 4}
    grid = (-(-count // rows), -(-width // options["BN"]), heads)
    launch(
        heads_product, grid, x, weight, out, count, size, width, heads, x.stride(0), x.stride(1), *weight.stride(),
        **options, num_stages=2, device=x.device,
    )  # fmt: skip
    return out


def lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """See `kernels/reference/linear.py`: a product for each term."""
    return _add_terms(y, x.reshape(-1, terms.inputs), slots, terms, linear)


def lora_embedding(y: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor, terms: LoraTerms) -> torch.Tensor:
    """See `kernels/reference/linear.py`."""
    ids = token_ids.flatten()
    return _add_terms(y, ids, slots, terms, definition.embedding)


def _add_terms(y: torch.Tensor, inputs: torch.Tensor, slots: torch.Tensor, terms: LoraTerms, down: Any) -> torch.Tensor:
    rows = y.view(-1, terms.width)
    check_slots(rows, inputs, slots)
    for term in terms.terms:
        tokens = tokens_of(slots, term.slot)
        add_products(rows, slots, term, tokens, linear(down(inputs[tokens], term.down), term.up))
    return y
