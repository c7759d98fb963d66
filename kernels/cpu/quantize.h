// Activations to integers: by each row's largest element, or by a given scale and offset.
//
// The formulas of kernels/reference/quantized.py, with the same roundings: x / scale is a true division, rounded half to
// even; NaN becomes 0 and leaves its mark in the row's scale.
#pragma once

#include "simd.h"

namespace llm {
namespace {

// Fewer activations than these are quantized by the calling thread alone.
constexpr int64_t SERIAL_ELEMENTS = 1 << 14;

// max|x| of a row; NaN when it holds one. As integers, |NaN| > infinity > every number.
LLM_INLINE float largest_magnitude(const float* x, int64_t k) {
    const I32 mask = set1_i(0x7fffffff);
    I32 most = set1_i(0);
    for (int64_t i = 0; i < k; i += LANES) most = max_i(most, and_i(as_int(load_part(x + i, k - i)), mask));
    return bits_to_float(static_cast<uint32_t>(largest(most)));
}

// clamp(round(x / divisor) + offset, -128, 127) of 16 elements; those beyond `count` give `offset`.
LLM_INLINE I32 quantize(const float* x, int64_t count, F32 divisor, F32 offset) {
    const F32 q = nan_to_zero(round_even(load_part(x, count) / divisor) + offset);
    return to_int(max(min(q, set1(127.0f)), set1(-128.0f)));
}

LLM_INLINE float row_scale(const float* x, int64_t k) { return largest_magnitude(x, k) / 127.0f; }
LLM_INLINE float row_divisor(float scale) { return scale == 0.0f ? 1.0f : scale; }

}  // namespace
}  // namespace llm
