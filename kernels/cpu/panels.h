// How a weight [n, k] is cut into panels of 16 output channels, and how a GEMM is cut into tiles and tasks.
//
// A panel holds 16 output channels side by side for every k, so vector lanes run along N. One lane reduces each output
// over k = 0, 1, ... K-1, whatever else is computed. The last panel is padded with zeros. kernels/README.md draws the
// formats.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace llm {
namespace {

// How many bytes ahead a step prefetches. Near a panel's end the target moves to the panel that is read next: `panels`
// panels further on when that many are read side by side.
struct Ahead {
    int64_t bytes, last, skip;
    Ahead(int64_t distance, int64_t step_bytes, int64_t steps, int64_t panels, int64_t panel_bytes)
        : bytes(distance), last(steps - distance / step_bytes), skip((panels - 1) * panel_bytes) {}
    LLM_INLINE int64_t distance(int64_t step) const { return step < last ? bytes : bytes + skip; }
};

// A number of batch rows or panels that is known at compile time.
template <int N> struct Rows { static constexpr int value = N; };

// Which of the `count` row tiles of a block, that multiply the same `panels` panels one after the other.
struct TileInBlock { int64_t index, count, panels; };

// Height of the tallest compiled tile.
#if LLM_AVX512
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif

// Height of the next tile when `left` batch rows remain: an even split into tiles of at most `most` rows. With AVX-512
// the first tile waits for memory and computes all that fit in the same time, but leaves the next tile `least` rows:
// fewer do not hide the latency of their products.
LLM_INLINE int64_t tile_rows(int64_t left, int64_t most, int64_t least) {
    if (left <= most) return left;
#if LLM_AVX512
    return min(most, left - least);
#else
    static_cast<void>(least);
    return ceil_div(left, ceil_div(left, most));
#endif
}

// A GEMM as tasks. The outer loop runs over blocks of row tiles, the inner one over groups of panels: a block's
// activations stay in the L2 cache while the panels stream past.
class Tasks {
    Scratch starts_;
    int64_t tiles_ = 0, panels_, block_tiles_, threads_, group_panels_ = 2;

  public:
    // `row_bytes`: bytes of one row of activations; `block_bytes`: the most that a block of rows may hold;
    // `least_rows`: of a row tile that is not the first.
    Tasks(int64_t m, int64_t n, int64_t most_rows, int64_t row_bytes, int64_t block_bytes, int64_t threads,
          int64_t least_rows = 4)
        : starts_((m + 1) * sizeof(int64_t)), panels_(ceil_div(n, LANES)), threads_(threads) {
        int64_t* start = starts_.as<int64_t>();
        for (start[0] = 0; start[tiles_] < m; ++tiles_)
            start[tiles_ + 1] = start[tiles_] + tile_rows(m - start[tiles_], most_rows, least_rows);
        block_tiles_ = max(4, block_bytes / (row_bytes * most_rows + 1));
        if (tiles_ == 1) group_panels_ = 4;  // as many as a tile of one row takes at once
    }
    int64_t tiles() const { return tiles_; }
    int64_t first_row(int64_t tile) const { return starts_.as<int64_t>()[tile]; }
    int64_t rows(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
    int64_t group_panels() const { return group_panels_; }
    TileInBlock in_block(int64_t tile) const {
        const int64_t first = tile / block_tiles_ * block_tiles_;
        return {tile - first, min(block_tiles_, tiles_ - first), group_panels_};
    }
    // Row tiles in one block, at most.
    int64_t block_tiles() const { return min(block_tiles_, tiles_); }
    // Calls run(Rows<count>, row tile, first of these rows in the tile, scratch): AT_ONCE batch rows of a tile at a
    // time, then one.
    template <int AT_ONCE, class Run> void for_rows(int64_t threads, int64_t scratch_bytes, const Run& run) const {
        constexpr int64_t parts = ceil_div(MAX_ROWS, AT_ONCE);
        parallel_for(tiles_ * parts, threads, scratch_bytes, [&](int64_t task, char* scratch) {
            const int64_t tile = task / parts, end = min(rows(tile), (task % parts + 1) * AT_ONCE);
            int64_t row = task % parts * AT_ONCE;
            if (row + AT_ONCE <= end) return run(Rows<AT_ONCE>{}, tile, row, scratch);
            for (; row < end; ++row) run(Rows<1>{}, tile, row, scratch);
        });
    }
    // Runs everything on all threads. For each task: prepare(first panel, end panel, scratch), then run(tile, first
    // panel, end panel, scratch) for each row tile of the block.
    template <class Prepare, class Run> void run(int64_t scratch_bytes, const Prepare& prepare, const Run& run) const {
        const int64_t groups = ceil_div(panels_, group_panels_), blocks = ceil_div(tiles_, block_tiles_);
        parallel_for(groups * blocks, threads_, scratch_bytes, [&](int64_t task, char* scratch) {
            const int64_t block = task / groups * block_tiles_, panel = task % groups * group_panels_;
            const int64_t end = min(panel + group_panels_, panels_);
            prepare(panel, end, scratch);
            for (int64_t tile = block; tile < min(block + block_tiles_, tiles_); ++tile) run(tile, panel, end, scratch);
        });
    }
    // The same without `prepare`: run(tile, first panel, end panel).
    template <class Run> void run(const Run& run_tile) const {
        run(0, [](int64_t, int64_t, char*) {},
            [&](int64_t tile, int64_t panel, int64_t end, char*) { run_tile(tile, panel, end); });
    }
};

// `rows` rows of `bytes` bytes each, side by side in memory, become [bytes / sizeof(Unit)][16] units: those of 16 rows
// beside each other. Missing rows and a last unit that is not full are filled up with zeros.
template <class Unit> void interleave(const char* src, int64_t bytes, int64_t rows, char* dst) {
    constexpr int64_t size = sizeof(Unit), line = LANES * size, most = 64 / size;  // a cache line of each row at once
    const int64_t whole = bytes / size, rest = bytes % size;
    if (rows < LANES) std::memset(dst, 0, ceil_div(bytes, size) * line);
    const auto move = [&](int64_t from, int64_t row, int64_t count) {
        const char* at = src + row * bytes + from * size;
        char* to = dst + from * line + row * size;
        for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * line, at + i * size, size);
    };
    for (int64_t from = 0; from + most <= whole; from += most)
        for (int64_t row = 0; row < rows; ++row) move(from, row, most);
    for (int64_t row = 0; row < rows; ++row) {
        move(whole / most * most, row, whole % most);
        Unit last = 0;
        std::memcpy(&last, src + row * bytes + whole * size, rest);
        if (rest) std::memcpy(dst + whole * line + row * size, &last, size);
    }
}

// Calls call(Rows<N>) with the compiled tile height N == rows.
template <class Call> LLM_INLINE void with_rows(int64_t rows, const Call& call) {
    switch (rows) {
        case 1: return call(Rows<1>{});
        case 2: return call(Rows<2>{});
        case 3: return call(Rows<3>{});
        case 4: return call(Rows<4>{});
        case 5: return call(Rows<5>{});
        case 6: return call(Rows<6>{});
#if LLM_AVX512
        case 7: return call(Rows<7>{});
        case 8: return call(Rows<8>{});
        case 9: return call(Rows<9>{});
        case 10: return call(Rows<10>{});
        case 11: return call(Rows<11>{});
        case 12: return call(Rows<12>{});
#endif
    }
}

// Calls call(Rows<count>, panel) for the panels [panel, end): WIDE of them at a time, then two, then one.
template <int WIDE, class Call> LLM_INLINE void for_panels(int64_t panel, int64_t end, const Call& call) {
    for (; panel + WIDE <= end; panel += WIDE) call(Rows<WIDE>{}, panel);
    if constexpr (WIDE > 1) for_panels<(WIDE > 2 ? 2 : 1)>(panel, end, call);
}

}  // namespace
}  // namespace llm
