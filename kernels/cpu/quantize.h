// Activations to integers: by each row's largest element, or by a given scale and offset.
//
// The formulas of kernels/reference/quantized.py, with the same roundings: x / scale is a true division, rounded half
// to even; NaN becomes 0 and leaves its mark in the row's scale.
#pragma once

#include "simd.h"

namespace llm {
namespace {

// Fewer activations than these are quantized by the calling thread alone.
constexpr int64_t SERIAL_ELEMENTS = 1 << 14;

// max|x| of a row; NaN when it holds one. As integers, |NaN| > infinity > every number.
LLM_INLINE float largest_magnitude(const float* x, int64_t k) {
    const I32 mask = set1_i(0x7fffffff);
    I32 a = set1_i(0), b = a, c = a, d = a;  // one alone waits for itself, and gcc 12 keeps it in memory
    int64_t i = 0;
    for (; i + 4 * LANES <= k; i += 4 * LANES) {
        a = max_i(a, and_i(as_int(load(x + i)), mask));
        b = max_i(b, and_i(as_int(load(x + i + LANES)), mask));
        c = max_i(c, and_i(as_int(load(x + i + 2 * LANES)), mask));
        d = max_i(d, and_i(as_int(load(x + i + 3 * LANES)), mask));
    }
    for (; i < k; i += LANES) a = max_i(a, and_i(as_int(load_part(x + i, k - i)), mask));
    return bits_to_float(static_cast<uint32_t>(largest(max_i(max_i(a, b), max_i(c, d)))));
}

// How a row becomes integers: clamp(round(x / divisor) + offset, -128, 127), rounded half to even.
//
// The quotients of a row's own scale are made of its reciprocal r, in a third of the time of divisions, and equal to
// them: x r and one correction give a quotient less than a unit in the last place away, and of such a one, r rounded to
// nearest and an exact remainder, the second correction makes the correctly rounded quotient (Markstein, IBM J. Res.
// Dev. 34, 1990). Remainders are exact while scales lie within 2^+-60: a smaller x than 2^-90 gives 0 either way.
class Quantizer {
    F32 divisor_, negative_, reciprocal_, offset_;
    bool divides_;

    LLM_INLINE F32 corrected(F32 q, F32 x) const { return fma(fma(q, negative_, x), reciprocal_, q); }
    LLM_INLINE F32 quotient(F32 x) const {
        return divides_ ? x / divisor_ : corrected(corrected(x * reciprocal_, x), x);
    }
#if defined(LLM_PLAIN)
    static bool has_exact_corrections(float) { return false; }  // nor fast: a fused multiply-add may be a call
#else
    static bool has_exact_corrections(float divisor) { return divisor >= 0x1p-60f && divisor <= 0x1p60f; }
#endif
    Quantizer(float divisor, int64_t offset, bool divides)
        : divisor_(set1(divisor)), negative_(set1(-divisor)), reciprocal_(set1(1.0f / divisor)),
          offset_(set1(static_cast<float>(offset))), divides_(divides) {}

  public:
    // By a scale for any x.
    Quantizer(float scale, int64_t offset) : Quantizer(scale, offset, true) {}
    // By the scale of a row; NaN of one that holds a NaN.
    explicit Quantizer(float row_scale)
        : Quantizer(row_scale == 0.0f ? 1.0f : row_scale, 0, !has_exact_corrections(row_scale)) {}
    LLM_INLINE I32 operator()(F32 x) const {
        const F32 q = nan_to_zero(round_even(quotient(x)) + offset_);
        return to_int(max(min(q, set1(127.0f)), set1(-128.0f)));
    }
};

LLM_INLINE float row_scale(const float* x, int64_t k) { return largest_magnitude(x, k) / 127.0f; }

// What quantizes a row as a product with int8 says, and the factor of its sums: by the row's own scale where
// `input_scale` is 0, else by it and `offset`, the factor being 1.
struct RowQuantizer {
    float factor;
    Quantizer quantize;

    RowQuantizer(const float* x, int64_t k, float input_scale, int64_t offset)
        : factor(input_scale == 0.0f ? row_scale(x, k) : 1.0f),
          quantize(input_scale == 0.0f ? Quantizer(factor) : Quantizer(input_scale, offset)) {}
};

}  // namespace
}  // namespace llm
