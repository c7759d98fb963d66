// Elementary functions on sixteen lanes, and conversions to narrow float types.
//
// Made of correctly rounded operations in a fixed order: the same bits on every instruction set and in every lane.
// Errors in units in the last place against float64, measured over the whole range by
// tests/kernels/test_kernels_fused.py: exp 1, tanh 2, erf 1.5. NaN gives NaN; exp overflows to inf and keeps denormals.
#pragma once

#include "simd.h"

namespace llm {
namespace {

// 2^n for integers n (held as floats) in [-126, 127].
LLM_INLINE F32 power_of_two(F32 n) { return as_float(shift_left<23>(to_int(n) + set1_i(127))); }

// x * 2^n for x in [0.5, 2] and integers n in [-252, 254], rounded once on overflow or denormal results.
LLM_INLINE F32 times_power_of_two(F32 x, F32 n) {
#if LLM_AVX512
    return {_mm512_scalef_ps(x.v, n.v)};
#else
    const F32 half = round_even(n * set1(0.5f));
    return x * power_of_two(half) * power_of_two(n - half);
#endif
}

// (e^r - 1) / r for |r| <= ln(2) / 2, of which e^r is the degree-6 minimax polynomial.
LLM_INLINE F32 exp_slope(F32 r) {
    F32 p = set1(0x1.6a50bep-10f);
    p = fma(p, r, set1(0x1.123976p-7f));
    p = fma(p, r, set1(0x1.5558acp-5f));
    p = fma(p, r, set1(0x1.555492p-3f));
    p = fma(p, r, set1(0x1.fffffcp-2f));
    return fma(p, r, set1(1.0f));
}
LLM_INLINE F32 exp_reduced(F32 r) { return fma(exp_slope(r), r, set1(1.0f)); }

// e^x.
LLM_INLINE F32 exp(F32 x) {
    x = max(set1(-104.0f), min(set1(89.0f), x));  // a NaN in x passes
    const F32 n = round_even(x * set1(0x1.715476p+0f));
    F32 r = fma(n, set1(-0x1.62e400p-1f), x);
    r = fma(n, set1(-0x1.7f7d1cp-20f), r);
    return times_power_of_two(exp_reduced(r), n);
}

// e^x - 1 for x <= 0.
LLM_INLINE F32 expm1_of_negative(F32 x) {
    return select_less(x, set1(-0.34375f), exp(x) - set1(1.0f), exp_slope(x) * x);
}

// 2^x for x <= 0; exactly 0 from -126.5 down. Adding 1.5 * 2^23 + 127 rounds x to an integer and leaves that integer's
// exponent field (0 for -127) in the lowest bits of the sum.
LLM_INLINE F32 exp2_of_negative(F32 x) {
    const F32 magic = set1(0x1.8000fep+23f);
    x = max(set1(-127.0f), x);  // a NaN in x passes
    const F32 rounded = x + magic;
    const F32 r = x - (rounded - magic);
    F32 p = set1(0x1.416b50p-13f);
    p = fma(p, r, set1(0x1.5f082ep-10f));
    p = fma(p, r, set1(0x1.3b2de0p-7f));
    p = fma(p, r, set1(0x1.c6af7cp-5f));
    p = fma(p, r, set1(0x1.ebfbdcp-3f));
    p = fma(p, r, set1(0x1.62e430p-1f));
    p = fma(p, r, set1(1.0f));
    return p * as_float(shift_left<23>(as_int(rounded)));
}

// The sign as -1 or 1; a negative zero counts as positive.
LLM_INLINE F32 with_sign_of(F32 magnitude, F32 x) { return select_less(x, zero(), zero() - magnitude, magnitude); }

// An odd polynomial near 0, elsewhere 1 - 2 / (e^2|x| + 1).
LLM_INLINE F32 tanh(F32 x) {
    const F32 size = abs(x), square = x * x;
    F32 p = set1(-5.70498872745e-3f);
    p = fma(p, square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    const F32 near = fma(p * square, x, x);
    const F32 far = set1(1.0f) - set1(2.0f) / (exp(size + size) + set1(1.0f));
    return select_less(size, set1(0.625f), near, with_sign_of(far, x));
}

// An odd polynomial near 0, elsewhere 1 - e^q(|x|).
LLM_INLINE F32 erf(F32 x) {
    const F32 size = abs(x), square = x * x;
    F32 p = set1(-5.96761703e-4f);
    p = fma(p, square, set1(4.99119423e-3f));
    p = fma(p, square, set1(-2.67681349e-2f));
    p = fma(p, square, set1(1.12819925e-1f));
    p = fma(p, square, set1(-3.76125336e-1f));
    p = fma(p, square, set1(1.28379166e-1f));
    const F32 near = fma(p, x, x);
    const F32 bounded = min(set1(4.0f), size);  // erf(4) rounds to 1; a NaN in `size` passes
    const F32 bounded_square = bounded * bounded;
    F32 q = fma(set1(-1.72853470e-5f), bounded, set1(3.83197126e-4f));
    q = fma(q, bounded_square, fma(set1(-3.88396438e-3f), bounded, set1(2.42546219e-2f)));
    q = fma(q, bounded, set1(-1.06777877e-1f));
    q = fma(q, bounded, set1(-6.34846687e-1f));
    q = fma(q, bounded, set1(-1.28717512e-1f));
    const F32 far = set1(1.0f) - exp(fma(q, bounded, zero() - bounded));
    return select_less(size, set1(0.927734375f), near, with_sign_of(far, x));
}

// log(1 + e^x): log(1 + u) for u in [0, 1] is 2 atanh(u / (2 + u)), an odd polynomial.
LLM_INLINE F32 softplus(F32 x) {
    const F32 u = exp(zero() - abs(x)), s = u / (u + set1(2.0f)), square = s * s;
    F32 p = set1(0x1.dba260p-3f);
    p = fma(p, square, set1(0x1.bc8cf8p-3f));
    p = fma(p, square, set1(0x1.24c926p-2f));
    p = fma(p, square, set1(0x1.9998d4p-2f));
    p = fma(p, square, set1(0x1.555556p-1f));
    return max(zero(), x) + fma(s * square, p, s + s);  // a NaN in x passes
}

LLM_INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// float32 to a storage type, rounded half to even; overflow gives inf, every NaN the type's quiet NaN.
template <class T> LLM_INLINE T narrow(float x);
template <> LLM_INLINE float narrow<float>(float x) { return x; }
template <> LLM_INLINE BF16 narrow<BF16>(float x) {
    const uint32_t bits = float_to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
template <> LLM_INLINE F16 narrow<F16>(float x) {
    const uint32_t bits = float_to_bits(x), size = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (size > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (size >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more round to inf
    if (size < 0x38800000u) {  // a denormal: its last place is 2^-24, the last place of floats in [0.5, 1)
        const float shifted = bits_to_float(size) + 0.5f;
        return {static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u))};
    }
    const uint32_t rounded = size + 0xfffu + (size >> 13 & 1);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

}  // namespace
}  // namespace llm
