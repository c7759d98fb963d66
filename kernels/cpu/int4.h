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

// y = (sum over groups, in order, of float(sum) * scale[g, n]) * row scale + bias[n]. A group is added by one FMA.
// group_size is a multiple of 8, or there is one group.
struct Int4Product : Product {
    const float* row_scale;  // [m]
    int64_t groups, group_steps;
    const int8_t* a = nullptr;       // of each tile, [k / 8][rows][8]
    const int32_t* start = nullptr;  // of each tile, [groups][rows]: -8 * the sum of a group's activations

    Int4Product(const Product& product, const float* row_scales)
        : Product(product), row_scale(row_scales), groups(ceil_div(k, group_size)),
          group_steps(groups == 1 ? steps() : group_size / STEP) {}

    int64_t steps() const { return ceil_div(k, STEP); }
    int64_t padded_k() const { return steps() * STEP; }
    int64_t panel_bytes() const { return steps() * PANEL_STEP; }
    const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(data) + index * panel_bytes(); }
    LLM_INLINE F32 group_scale(int64_t group, int64_t column) const {
        return scales().load(group, column, n - column, 4 * LANES);
    }
    // Writes y = sums * row scale (+ bias) for one panel and `rows` batch rows, whose sums are `stride` floats apart.
    LLM_INLINE void finish(int64_t row, int64_t rows, int64_t panel, const float* sums, int64_t stride) const {
        const float* scale = row_scale + row;
        store_outputs(row, rows, panel * LANES, [=](int64_t r) { return load(sums + r * stride) * set1(scale[r]); });
    }
};

}  // namespace

#if LLM_TILES
// Computes with AMX tiles; returns false, having done nothing, where vectors are faster.
bool linear_int4_by_tiles(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads);
#endif

}  // namespace llm
