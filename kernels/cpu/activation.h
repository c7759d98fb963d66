// Activations, plain and gated, element by element: the vector body and the tail of a row compute alike.
#pragma once

#include "vector_math.h"

namespace llm {
namespace {

// kernels/cpu/activation.py has the same numbers.
enum Function : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, QUICK_GELU = 3, RELU = 4, RELU_SQUARED = 5 };

LLM_INLINE F32 sigmoid_times(F32 x, F32 slope) { return x / (exp(zero() - slope) + set1(1.0f)); }

template <int64_t FUNCTION> LLM_INLINE F32 activate(F32 x) {
    if constexpr (FUNCTION == SILU) return sigmoid_times(x, x);
    if constexpr (FUNCTION == QUICK_GELU) return sigmoid_times(x, x * set1(1.702f));
    if constexpr (FUNCTION == GELU) return x * set1(0.5f) * (erf(x * set1(0x1.6a09e6p-1f)) + set1(1.0f));
    if constexpr (FUNCTION == GELU_TANH) {
        // 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u); the right side loses no precision where tanh is near -1.
        const F32 cube = x * x * x;
        return sigmoid_times(x, fma(cube, set1(0.044715f), x) * set1(1.5957691216057308f));
    }
    // NaN passes through: x86's max(a, b) is b if either is NaN.
    if constexpr (FUNCTION == RELU) return max(zero(), x);
    if constexpr (FUNCTION == RELU_SQUARED) {
        const F32 positive = max(zero(), x);
        return positive * positive;
    }
}

template <int64_t FUNCTION, bool GATED>
void activate_row(const float* gate, const float* up, float* out, int64_t width) {
    constexpr int64_t ahead = 512;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        prefetch(gate + i + ahead);
        F32 value = activate<FUNCTION>(load(gate + i));
        if (GATED) {
            prefetch(up + i + ahead);
            value = value * load(up + i);
        }
        store(out + i, value);
    }
    if (i == width) return;
    const F32 value = activate<FUNCTION>(load_part(gate + i, width - i));
    store_part(out + i, GATED ? value * load_part(up + i, width - i) : value, width - i);
}

template <int64_t FUNCTION> void activate_row(const float* gate, const float* up, float* out, int64_t width) {
    if (up) return activate_row<FUNCTION, true>(gate, up, out, width);
    activate_row<FUNCTION, false>(gate, up, out, width);
}

void activation_row(int64_t function, const float* gate, const float* up, float* out, int64_t width) {
    if (function == SILU) return activate_row<SILU>(gate, up, out, width);
    if (function == GELU) return activate_row<GELU>(gate, up, out, width);
    if (function == GELU_TANH) return activate_row<GELU_TANH>(gate, up, out, width);
    if (function == QUICK_GELU) return activate_row<QUICK_GELU>(gate, up, out, width);
    if (function == RELU) return activate_row<RELU>(gate, up, out, width);
    activate_row<RELU_SQUARED>(gate, up, out, width);
}

}  // namespace
}  // namespace llm
