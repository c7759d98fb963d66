// Sixteen groups of a weight side by side: lane g of vector i is element i of group g. Each group has a scale of its
// own, so every step of quantizing is one for each lane: no sum or maximum across lanes.
#pragma once

#include "integers.h"
#include "transpose.h"
#include "vector_math.h"

namespace llm {
namespace {

// Floats of a buffer for a tile: whole blocks of 16 x 16, which are transposed.
constexpr int64_t tile_floats(int64_t size) { return ceil_div(size, LANES) * LANES * LANES; }

struct GroupTile {
    float* x;  // [size][16]
    int64_t size;

    LLM_INLINE F32 operator[](int64_t i) const { return load(x + i * LANES); }

    // From `count` groups that follow each other; the other lanes are 0.
    template <class T> void read(const T* src, int64_t count) const {
        alignas(64) float tile[LANES * LANES] = {};
        for (int64_t i = 0; i < size; i += LANES) {
            for (int64_t lane = 0; lane < count; ++lane) {
                const T* from = src + lane * size + i;
                store(tile + lane * LANES, i + LANES <= size ? load(from) : load_part(from, size - i));
            }
            transpose_tile(tile, x + i * LANES, LANES);
        }
    }
    // |x| of each group's largest; compared as integers, NaN > infinity > every number.
    LLM_INLINE F32 largest() const {
        const I32 mask = set1_i(0x7fffffff);
        I32 found = set1_i(0);
        for (int64_t i = 0; i < size; ++i) found = max_i(found, and_i(as_int((*this)[i]), mask));
        return as_float(found);
    }
};

// codes [size][16] -> q, `count` groups that follow each other.
inline void write_codes(const float* codes, int8_t* q, int64_t size, int64_t count) {
    alignas(64) float tile[LANES * LANES];
    for (int64_t i = 0; i < size; i += LANES) {
        transpose_tile(codes + i * LANES, tile, LANES);
        for (int64_t lane = 0; lane < count; ++lane) {
            alignas(16) int8_t bytes[LANES];
            int8_t* to = q + lane * size + i;
            const bool whole = i + LANES <= size;
            store_int8(whole ? to : bytes, to_int(load(tile + lane * LANES)));
            if (!whole) std::memcpy(to, bytes, size - i);
        }
    }
}

// The sum of value(place), value(place + 32) and so on over `stripes` of them: runs of 16 are summed by themselves, and
// runs of 16 such sums again.
template <class Value> LLM_INLINE F32 sum_stripes(int64_t stripes, int64_t place, const Value& value) {
    constexpr int64_t levels = 4, run = 16;
    const auto sum_of = [&](int64_t from, int64_t end) {
        F32 sum = zero();
        for (int64_t i = from * 32 + place; i < end * 32; i += 32) sum = sum + value(i);
        return sum;
    };
    if (stripes < run) return sum_of(0, stripes);
    F32 sums[levels] = {zero(), zero(), zero(), zero()};
    int64_t done = run;
    for (; done <= stripes; done += run) {
        sums[0] = sum_of(done - run, done);
        for (int64_t level = 1, size = run; level < levels && done % size == 0; ++level, size *= run)
            sums[level] = sums[level] + sums[level - 1], sums[level - 1] = zero();
    }
    return ((sum_of(done - run, stripes) + sums[1]) + sums[2]) + sums[3];
}

// The sum over i < size of value(i) for each lane, in the order of `ordered_sum` of
// kernels/reference/quantize_weight.py. value(i) is called once for each i.
template <class Value> LLM_INLINE F32 ordered_sum(int64_t size, const Value& value) {
    F32 total = zero();
    if (size == 32) {  // most of all groups
        LLM_UNROLL for (int j = 0; j < 8; ++j)
            total = total + (((value(j) + value(8 + j)) + value(16 + j)) + value(24 + j));
        return total;
    }
    const int64_t stripes = size / 32, rest = stripes * 32, vectors = (size - rest) / 8;
    for (int64_t i = rest + vectors * 8; i < size; ++i) total = total + value(i);
    for (int64_t j = 0; j < 8; ++j) {
        F32 lane = sum_stripes(stripes, j, value);
        for (int64_t vector = 0; vector < vectors; ++vector) lane = lane + value(rest + vector * 8 + j);
        for (int64_t place = 8 + j; place < 32; place += 8) lane = lane + sum_stripes(stripes, place, value);
        total = total + lane;
    }
    return total;
}

// Each lane rounded to bfloat16, half to even; finite.
LLM_INLINE F32 round_bf16(F32 x) {
    const I32 bits = as_int(x), odd = and_i(shift_right<16>(bits), set1_i(1));
    return as_float(and_i(bits + set1_i(0x7fff) + odd, set1_i(static_cast<int32_t>(0xffff0000))));
}
// Each lane rounded to float16.
inline F32 round_f16(F32 x) {
    alignas(64) float values[LANES];
    store(values, x);
    for (float& value : values) value = widen(narrow<F16>(value));
    return load(values);
}
// 1 / x; 0 where that is 2^100 and more.
LLM_INLINE F32 inverse(F32 x) { return select_less(set1(0x1p-100f), abs(x), set1(1.0f) / x, zero()); }

}  // namespace
}  // namespace llm
