// Sums in the order of `ordered_sum` of kernels/reference/quantize_weight.py, several side by side.
#pragma once

#include <type_traits>

#include "simd.h"

namespace llm {
namespace {

// Sums whose last step is taken together: the additions of one wait for each other.
constexpr int64_t SUMS = 8;

#if LLM_PLAIN || LLM_NEON
// lane[j] = low[j] + low[8 + j] + high[j] + high[8 + j]
LLM_INLINE void store_lanes(float* lane, F32 low, F32 high) {
    alignas(64) float sums[32];
    store(sums, low), store(sums + LANES, high);
    for (int64_t j = 0; j < 8; ++j) lane[j] = sums[j] + sums[8 + j] + sums[16 + j] + sums[24 + j];
}
// totals[i] += lane[i][0], then lane[i][1] and so on
LLM_INLINE void add_lanes(float* totals, const float (*lane)[8]) {
    for (int64_t j = 0; j < 8; ++j)
        for (int64_t i = 0; i < SUMS; ++i) totals[i] += lane[i][j];
}
#else
LLM_INLINE void store_lanes(float* lane, F32 low, F32 high) {
    _mm256_storeu_ps(lane, low_lanes(low) + high_lanes(low) + low_lanes(high) + high_lanes(high));
}
LLM_INLINE void add_lanes(float* totals, const float (*lane)[8]) {
    __m256 row[8], pair[8], four[8];
    LLM_UNROLL for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(lane[i]);
    LLM_UNROLL for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]), pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
    LLM_UNROLL for (int i = 0; i < 8; i += 4) {
        LLM_UNROLL for (int j = 0; j < 2; ++j) {
            four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0x44);
            four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + 2 + j], 0xEE);
        }
    }
    __m256 total = _mm256_loadu_ps(totals);
    LLM_UNROLL for (int j = 0; j < 4; ++j) total = total + _mm256_permute2f128_ps(four[j], four[4 + j], 0x20);
    LLM_UNROLL for (int j = 0; j < 4; ++j) total = total + _mm256_permute2f128_ps(four[j], four[4 + j], 0x31);
    _mm256_storeu_ps(totals, total);
}
#endif

// Sums that fill no stripe of 32: 8 at a time into the first of 32, at last one by one, which are returned.
LLM_INLINE float add_rest(int64_t left, float* lane, F32 low, F32 high, F32 first, F32 second) {
    alignas(64) float sums[32], rest[32];
    store(sums, low), store(sums + LANES, high), store(rest, first), store(rest + LANES, second);
    float total = 0.0f;
    for (int64_t at = 0; at + 8 <= left; at += 8)
        for (int64_t j = 0; j < 8; ++j) sums[j] += rest[at + j];
    for (int64_t at = left / 8 * 8; at < left; ++at) total += rest[at];
    store_lanes(lane, load(sums), load(sums + LANES));
    return total;
}

using Whole = std::true_type;
using Part = std::false_type;

// The sum over i < count of value(i), in the order of `ordered_sum` and up to its last step: `lane` [8] is left to be
// added to what is returned. `value(i, whole)` gives 16 lanes from i on; without `whole`, those from `count` on are 0.
// It is called once for each i.
//
// 32 sums side by side over stripes of 32; runs of 16 stripes are summed by themselves, and runs of them again.
template <class Value> LLM_INLINE float ordered_lanes(int64_t count, float* lane, const Value& value) {
    constexpr int64_t levels = 4, run = 16;
    const int64_t stripes = count / 32, left = count - stripes * 32;
    F32 low = zero(), high = zero();
    const auto add = [&](int64_t i) {
        low = low + value(i * 32, Whole{}), high = high + value(i * 32 + LANES, Whole{});
    };
    if (stripes < run) {
        for (int64_t i = 0; i < stripes; ++i) add(i);
    } else {
        F32 lows[levels] = {low, low, low, low}, highs[levels] = {low, low, low, low};
        int64_t i = 0;
        while (i + run <= stripes) {
            low = high = zero();
            for (int64_t end = i + run; i < end; ++i) add(i);
            for (int64_t level = 1, size = run; level < levels; ++level, size *= run) {
                lows[level] = lows[level] + low, highs[level] = highs[level] + high;
                if (i & (size * (run - 1))) break;
                low = lows[level], high = highs[level];
                if (level < levels - 1) lows[level] = highs[level] = zero();
            }
        }
        low = high = zero();
        for (; i < stripes; ++i) add(i);
        for (int64_t level = 1; level < levels; ++level) low = low + lows[level], high = high + highs[level];
    }
    if (!left) return store_lanes(lane, low, high), 0.0f;
    const F32 first = value(stripes * 32, Part{}), second = left > LANES ? value(stripes * 32 + LANES, Part{}) : zero();
    return add_rest(left, lane, low, high, first, second);
}

}  // namespace
}  // namespace llm
