// Sixteen rows of sixteen floats -> their columns.
#pragma once

#include "simd.h"

namespace llm {
namespace {

#if LLM_AVX512 || LLM_AVX2
// 8 rows of 8 floats, 16 apart, -> their columns, 16 apart.
LLM_INLINE void transpose_8(const float* from, float* to) {
    __m256 pairs[8], fours[8];
    LLM_UNROLL for (int i = 0; i < 8; i += 2) {
        const __m256 a = _mm256_loadu_ps(from + i * LANES), b = _mm256_loadu_ps(from + (i + 1) * LANES);
        pairs[i] = _mm256_unpacklo_ps(a, b), pairs[i + 1] = _mm256_unpackhi_ps(a, b);
    }
    LLM_UNROLL for (int i = 0; i < 8; i += 4) LLM_UNROLL for (int j = 0; j < 2; ++j) {
        fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
        fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
    LLM_UNROLL for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * LANES, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}
#endif

// tile [16][16] -> to [count][16], its first `count` columns.
LLM_INLINE void transpose_tile(const float* tile, float* to, int64_t count) {
#if LLM_AVX512 || LLM_AVX2
    if (count == LANES) {
        LLM_UNROLL for (int row = 0; row < LANES; row += 8) LLM_UNROLL for (int column = 0; column < LANES; column += 8)
            transpose_8(tile + row * LANES + column, to + column * LANES + row);
        return;
    }
#endif
    for (int64_t column = 0; column < count; ++column)
        for (int64_t row = 0; row < LANES; ++row) to[column * LANES + row] = tile[row * LANES + column];
}

}  // namespace
}  // namespace llm
