"""What the kernels here are written in besides `triton.language`: arithmetic that is the same wherever they run.

Products of tiles, rounding, codes of 8 bits, and functions that Triton has for some targets alone. Triton's interpreter
multiplies the bits of bfloat16 and cuts float32 to it; here both are done right.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The least side of a tile in a product: tensor cores take no less. The interpreter would.
LEAST_TILE = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)
# x + this - this is x rounded to a whole number, half to even, for |x| < 2^22.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32: a [M, K], b [K, N] of one floating type. Products of 16 columns, or in the interpreter of
    64, are added in order, so that a sum does not depend on K."""
    tl.static_assert(a.shape[0] >= LEAST_TILE and a.shape[1] >= LEAST_TILE and b.shape[1] >= LEAST_TILE)
    tl.static_assert(a.dtype == b.dtype)
    if INTERPRETED and a.shape[1] > 64:
        HALF: tl.constexpr = a.shape[1] // 2
        first, second = tl.split(a.reshape(a.shape[0], 2, HALF).permute(0, 2, 1))
        above, below = tl.split(b.reshape(2, HALF, b.shape[1]).permute(1, 2, 0))
        return dot(second, below, dot(first, above, acc))
    elif INTERPRETED:
        return acc + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_int8(a, b, acc):
    """acc + a b, exact in int32: a [M, K], b [K, N] int8. Tensor cores take 32 of K at once."""
    tl.static_assert(a.shape[0] >= LEAST_TILE and a.shape[1] >= 2 * LEAST_TILE and b.shape[1] >= LEAST_TILE)
    tl.static_assert(a.dtype == tl.int8 and b.dtype == tl.int8)
    return tl.dot(a, b, acc, out_dtype=tl.int32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 -> a floating type, to the nearest, half to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def whole(x):
    """float32 with |x| < 2^22, rounded to a whole number, half to even."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def int8_codes(x):
    """clamp(round_half_even(x), -128, 127) as int8, 0 for NaN."""
    return whole(tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)).to(tl.int8)


@triton.jit
def from_float8(codes):
    """float8_e4m3fn as int8 or uint8 -> float32, without NaN.

    The bits of an e4m3 are those of a float16 that is 256 times smaller, subnormal numbers too. No target converts all
    of its variants.
    """
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def float8_codes(x):
    """float32, clamped to +-448 and rounded to the nearest e4m3, half to even -> int8."""
    x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = whole(tl.abs(x) * 512.0).to(tl.int32)
    return (tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def nibbles(packed, N: tl.constexpr, K: tl.constexpr):
    """int8 [N, K / 2] -> the int4 in it, int8 [N, K]: the low nibble first."""
    return tl.join((packed << 4) >> 4, packed >> 4).reshape(N, K)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    size = tl.exp(-2.0 * tl.abs(x))
    value = tl.div_rn(1.0 - size, 1.0 + size)
    # Where 1 - size cancels the series is closer.
    near = tl.abs(x) - tl.abs(x) * x * x * (1.0 / 3.0)
    value = tl.where(tl.abs(x) < 0.01, near, value)
    return tl.where(x < 0, -value, value)


@triton.jit
def softplus(x):
    """log(1 + e^x). The quotient gives back what is lost where e^x is rounded away beside 1."""
    size = tl.exp(-tl.abs(x))
    total = 1.0 + size
    lost = total - 1.0
    log1p = tl.where(lost == 0.0, size, tl.div_rn(tl.log(total) * size, tl.where(lost == 0.0, 1.0, lost)))
    return tl.maximum(x, 0.0) + log1p
