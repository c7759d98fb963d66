// Shared by the two int4 GEMMs with int8 activations: gemm_int4.cpp uses vectors, gemm_int4_tiles.cpp AMX tiles.
//
// A panel is [k / 8][16][4] bytes. Byte j of an output channel holds weight k + j plus 8 in its low nibble and weight k
// + 4 + j plus 8 in its high nibble. A mask and a shift give four unsigned bytes of consecutive k. k is padded; the
// padding's activations are 0.
#pragma once

#include "weight.h"

namespace llm {
namespace {

constexpr int64_t STEP = 8;                // k of one step
constexpr int64_t PANEL_STEP = LANES * 4;  // bytes of a panel per step

// What was made of activations: each group of k of each batch row has a scale of its own, as the weight's has. All
// [groups][rows] of a tile.
struct GroupInputs {
    const float* scale;    // largest magnitude / 127
    const float* sum;      // scale * the sum of the group's integers
    const int32_t* start;  // -8 * the sum of the group's integers, which takes the nibbles' 8 back

    LLM_INLINE GroupInputs from(int64_t place) const { return {scale + place, sum + place, start + place}; }
};

// total = fma(float(sum) * scale of the inputs, scale[g, n], total), then with zero points or minima total =
// fma(offset, sum of the inputs, total), for each group in order; y = total + bias[n]. group_size is a multiple of 8,
// or there is one group.
struct Int4Product : Product {
    int64_t groups, group_steps;
    const int8_t* a = nullptr;  // of each tile, [k / 8][rows][8]
    GroupInputs inputs = {};

    explicit Int4Product(const Product& product)
        : Product(product), groups(ceil_div(k, group_size)), group_steps(groups == 1 ? steps() : group_size / STEP) {}

    int64_t steps() const { return ceil_div(k, STEP); }
    int64_t padded_k() const { return steps() * STEP; }
    int64_t panel_bytes() const { return steps() * PANEL_STEP; }
    const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(data) + index * panel_bytes(); }
    bool is_shifted() const { return zero || minimum; }
    LLM_INLINE F32 group_scale(int64_t group, int64_t column) const {
        return scales().load(group, column, n - column, 4 * LANES);
    }
    // What a weight of this group is beside w * scale: 8 * scale - minimum, or -zero * scale.
    LLM_INLINE F32 group_offset(int64_t group, int64_t column, F32 scale) const {
        if (minimum) return scale * set1(8.0f) - minima().load(group, column, n - column, 4 * LANES);
        return llm::zero() - zeros().load(group, column, n - column, 4 * LANES) * scale;
    }
    // Adds the exact sums of COUNT groups, of `rows` batch rows and one panel, to `sums`. `stride`: between batch rows;
    // the groups are `apart` sums and `inputs_apart` of `at` apart.
    template <int COUNT>
    LLM_INLINE void add_groups(int64_t group, int64_t column, const GroupInputs& at, int64_t inputs_apart, int64_t rows,
                               const int32_t* exact, int64_t apart, float* sums, int64_t stride) const {
        F32 scale[COUNT], offset[COUNT];
        LLM_UNROLL for (int g = 0; g < COUNT; ++g) scale[g] = group_scale(group + g, column);
        const auto add = [&](int64_t r, int g, F32 total) {
            const F32 sum = to_float(load_i(exact + g * apart + r * stride)) * set1(at.scale[g * inputs_apart + r]);
            return fma(sum, scale[g], total);
        };
        if (!is_shifted()) {
            LLM_UNROLL for (int64_t r = 0; r < rows; ++r) {
                F32 total = load(sums + r * stride);
                LLM_UNROLL for (int g = 0; g < COUNT; ++g) total = add(r, g, total);
                store(sums + r * stride, total);
            }
            return;
        }
        LLM_UNROLL for (int g = 0; g < COUNT; ++g) offset[g] = group_offset(group + g, column, scale[g]);
        LLM_UNROLL for (int64_t r = 0; r < rows; ++r) {
            F32 total = load(sums + r * stride);
            LLM_UNROLL for (int g = 0; g < COUNT; ++g)
                total = fma(offset[g], set1(at.sum[g * inputs_apart + r]), add(r, g, total));
            store(sums + r * stride, total);
        }
    }
    // Writes y = sums (+ bias) for one panel and `rows` batch rows, whose sums are `stride` floats apart.
    LLM_INLINE void finish(int64_t row, int64_t rows, int64_t panel, const float* sums, int64_t stride) const {
        store_outputs(row, rows, panel * LANES, [=](int64_t r) { return load(sums + r * stride); });
    }
};

// Memory of GroupInputs for m batch rows.
class InputMemory {
    const int64_t count_;
    const Scratch floats_, starts_;

  public:
    InputMemory(int64_t m, int64_t groups)
        : count_(m * groups), floats_(2 * count_ * sizeof(float)), starts_(count_ * sizeof(int32_t)) {}
    float* scale() const { return floats_.as<float>(); }
    float* sum() const { return scale() + count_; }
    int32_t* start() const { return starts_.as<int32_t>(); }
    GroupInputs inputs() const { return {scale(), sum(), start()}; }
    // What one group of one row is: its scale, and the sum of its integers.
    void keep(int64_t place, float scale_of_row, int32_t sum_of_row) const {
        scale()[place] = scale_of_row;
        sum()[place] = scale_of_row * static_cast<float>(sum_of_row);
        start()[place] = -8 * sum_of_row;
    }
};

}  // namespace

#if LLM_TILES
// Computes with AMX tiles; returns false, having done nothing, where vectors are faster.
bool linear_int4_by_tiles(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);
#endif

}  // namespace llm
