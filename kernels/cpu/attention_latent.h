// Staging of latent attention: 16 rows of its KV cache as a panel of keys and a panel of values.
//
// Rows are widened and transposed in tiles of 16 channels: a tile stays in the L1 cache, a panel of keys does not.
#pragma once

#include "quantized_cache.h"

namespace llm {
namespace {

LLM_INLINE F32 load(const int8_t* p) { return to_float(load_int8(p)); }

// The rows of lanes [first, end) of a panel; scales of 1 where elements are no codes.
template <class T> struct LatentRows {
    const T* from[LANES];
    float latent[LANES], rope[LANES];
    int64_t first, end;
};

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

// Channels [first, end) of all rows -> keys [channels][16], and if `values` is not null values [16][end].
template <class T>
void stage_channels(const LatentRows<T>& rows, const float* scales, int64_t first, int64_t end, float* keys,
                    float* values) {
    alignas(64) float tile[LANES * LANES] = {};
    for (int64_t channel = first; channel < end; channel += LANES) {
        const int64_t count = min(LANES, end - channel);
        for (int64_t lane = rows.first; lane < rows.end; ++lane) {
            const T* from = rows.from[lane] + channel;
            float* to = tile + lane * LANES;
            if (count == LANES) store(to, load(from) * set1(scales[lane]));
            else
                for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]) * scales[lane];
            if (values) store_part(values + lane * end + channel, load(to), count);
        }
        transpose_tile(tile, keys + channel * LANES, count);
    }
}

}  // namespace
}  // namespace llm
