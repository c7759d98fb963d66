// Rotates rows in blocks by a Hadamard matrix: the formula and the order of kernels/reference/rotation.py.
#pragma once

#include "simd.h"

namespace llm {
namespace {

// Each lane changes its place with the lane STRIDE apart, 1, 2, 4 or 8.
#if LLM_AVX512
template <int STRIDE> LLM_INLINE F32 swap_lanes(F32 x) {
    if constexpr (STRIDE == 1) return {_mm512_permute_ps(x.v, 0xb1)};
    else if constexpr (STRIDE == 2) return {_mm512_permute_ps(x.v, 0x4e)};
    else if constexpr (STRIDE == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
    else return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
}
#elif LLM_AVX2
template <int STRIDE> LLM_INLINE F32 swap_lanes(F32 x) {
    if constexpr (STRIDE == 1) return {_mm256_permute_ps(x.lo, 0xb1), _mm256_permute_ps(x.hi, 0xb1)};
    else if constexpr (STRIDE == 2) return {_mm256_permute_ps(x.lo, 0x4e), _mm256_permute_ps(x.hi, 0x4e)};
    else if constexpr (STRIDE == 4)
        return {_mm256_permute2f128_ps(x.lo, x.lo, 1), _mm256_permute2f128_ps(x.hi, x.hi, 1)};
    else return {x.hi, x.lo};
}
#elif LLM_NEON
template <int STRIDE> LLM_INLINE F32 swap_lanes(F32 x) {
    return quarters<F32>([&](int i) {
        if constexpr (STRIDE == 1) return vrev64q_f32(x.v[i]);
        else if constexpr (STRIDE == 2) return vextq_f32(x.v[i], x.v[i], 2);
        else return x.v[i ^ (STRIDE / 4)];
    });
}
#else
template <int STRIDE> LLM_INLINE F32 swap_lanes(F32 x) {
    return lanes<F32>([&](int i) { return x.v[i ^ STRIDE]; });
}
#endif

// Sums in the lower lane of each pair, differences in the upper: a product with 1 or -1 is exact.
template <int STRIDE> LLM_INLINE F32 add_pairs(F32 x) {
    alignas(64) constexpr auto signs = [] {
        struct { float v[LANES]; } out{};
        for (int i = 0; i < LANES; ++i) out.v[i] = i & STRIDE ? -1.0f : 1.0f;
        return out;
    }();
#if LLM_PLAIN
    return x * load(signs.v) + swap_lanes<STRIDE>(x);
#else
    return fma(x, load(signs.v), swap_lanes<STRIDE>(x));
#endif
}

// x [VECTORS][16] -> y, one block.
template <int VECTORS> LLM_INLINE void rotate_block(const float* x, float* y, F32 factor) {
    F32 v[VECTORS];
    LLM_UNROLL for (int i = 0; i < VECTORS; ++i) v[i] = load(x + i * LANES);
    LLM_UNROLL for (int stride = 1; stride < VECTORS; stride *= 2) LLM_UNROLL for (int i = 0; i < VECTORS; ++i) {
        if (i & stride) continue;
        const F32 a = v[i], b = v[i + stride];
        v[i] = a + b, v[i + stride] = a - b;
    }
    LLM_UNROLL for (int i = 0; i < VECTORS; ++i)
        store(y + i * LANES, add_pairs<8>(add_pairs<4>(add_pairs<2>(add_pairs<1>(v[i])))) * factor);
}

template <int VECTORS> void rotate_blocks(const float* x, float* y, int64_t k) {
    const F32 factor = set1(static_cast<float>(1 / std::sqrt(static_cast<double>(VECTORS * LANES))));
    for (int64_t i = 0; i < k; i += VECTORS * LANES) rotate_block<VECTORS>(x + i, y + i, factor);
}

// x [k] -> y [k], which may be x; `block` is 16, 32, 64, 128 or 256 and divides k.
inline void rotate_row(const float* x, float* y, int64_t k, int64_t block) {
    switch (block / LANES) {
        case 1: return rotate_blocks<1>(x, y, k);
        case 2: return rotate_blocks<2>(x, y, k);
        case 4: return rotate_blocks<4>(x, y, k);
        case 8: return rotate_blocks<8>(x, y, k);
        default: return rotate_blocks<16>(x, y, k);
    }
}

}  // namespace
}  // namespace llm
