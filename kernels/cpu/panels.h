// How a weight [n, k] is cut into panels of 16 rows, and how the work of a product is cut into tiles and tasks.
//
// A panel holds 16 outputs (rows of W) side by side for every k, so that the lanes of a vector run along N and each
// output is reduced over k = 0, 1, ... K-1 by one lane, whatever else is computed. The last panel is padded with zeros.
// kernels/README.md draws the formats.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace llm {
namespace {

LLM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether every id names one of `n` rows.
LLM_INLINE bool within(const int64_t* ids, int64_t count, int64_t n) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= n) return false;
    return true;
}

LLM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// How many of `left` rows the next tile takes, when a tile holds at most `most`: as even a split as tiles allow.
LLM_INLINE int64_t even_share(int64_t left, int64_t most) { return ceil_div(left, ceil_div(left, most)); }

// How far ahead a step prefetches. Near the end of a panel that is past it: there, in the panel that will be read next,
// which `panels` side by side make one that many further on.
struct Ahead {
    int64_t bytes, turn, skip;
    Ahead(int64_t distance, int64_t step_bytes, int64_t steps, int64_t panels, int64_t panel_bytes)
        : bytes(distance), turn(steps - distance / step_bytes), skip((panels - 1) * panel_bytes) {}
    LLM_INLINE int64_t distance(int64_t step) const { return step < turn ? bytes : bytes + skip; }
};

// Rows of the next tile: tiles of 1 to 6, 8, 10 and 12 rows are compiled.
LLM_INLINE int64_t tile_rows(int64_t left, int64_t most) {
    const int64_t share = even_share(left, most);
    if (share <= 6 || share % 2 == 0) return share;
    return share < left ? share + 1 : share - 1;
}

// The product's tasks: row blocks outside, groups of panels inside, so that a block of activations stays in the cache
// while the panels stream past it.
struct Tasks {
    int64_t rows, panels;            // of the whole product
    int64_t block_rows, group_panels;  // of one task
    int64_t blocks() const { return ceil_div(rows, block_rows); }
    int64_t groups() const { return ceil_div(panels, group_panels); }
    int64_t count() const { return blocks() * groups(); }
    int64_t first_row(int64_t task) const { return task / groups() * block_rows; }
    int64_t end_row(int64_t task) const { return least(rows, first_row(task) + block_rows); }
    int64_t first_panel(int64_t task) const { return task % groups() * group_panels; }
    int64_t end_panel(int64_t task) const { return least(panels, first_panel(task) + group_panels); }
    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
};

}  // namespace
}  // namespace llm
