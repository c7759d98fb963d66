// GEMM with AMX tiles: 16 batch rows by 64 output channels at once, from the same panels as every other instruction
// set.
//
// A panel's 64-byte line (2 bfloat16 or 4 int8 of each of 16 output channels) is a line of a weight tile as it lies. A
// step is 16 lines. Activations are copied to operands, block by block: [row tile][step][part][rows][64 bytes].
//
// int8: int32 sums are exact. bfloat16: an activation is cut into three bfloat16 parts that hold all its 24 bits. Each
// step adds the products with the first part, then the second, then the third:
//     y = (((0 + t(0, 0)) + t(0, 1)) + t(0, 2)) + t(1, 0) + ...
//     t(s, p) = chain over even k + chain over odd k, of the 32 k of step s and part p
// With LLM(dtype="bfloat16") an activation is rounded to the nearest bfloat16 and has one part.
// This order does not depend on the other batch rows, the tile or the thread. The instruction flushes denormals: each
// product has an error below 2^-126 from that.
//
// The compiler does not know what the tile instructions read and write: hence their "memory" clobbers.
#pragma once

#include "panels.h"
#include "quantize.h"
#include "rotate.h"

#if LLM_TILES

namespace llm {
namespace {

constexpr int64_t LINE = 64;  // bytes of a line of a tile
constexpr int64_t TILE_LINES = 16;
constexpr int64_t TILE_BYTES = LINE * TILE_LINES;
constexpr int64_t TILE_PANELS = 4;            // panels that share one load of the operands
constexpr int64_t BLOCK_STEPS = 32;           // the operands of 8 row tiles stay in the L2 cache
constexpr int64_t SHORT_STEPS = 8;            // TILE_PANELS panels stay in the L1 cache
constexpr int64_t OPERAND_BYTES = 704 << 10;  // of a block of more than LEAST_TILES row tiles
constexpr int64_t LEAST_TILES = 8, MOST_TILES = 32;
constexpr int64_t MOST_GROUPS = 8;    // groups of panels in a task
constexpr int64_t TILE_AHEAD = 2048;  // bytes of a panel to prefetch ahead

// AddressSanitizer does not see what a tile instruction reads; an ordinary load of the same lines makes it look.
LLM_INLINE void touch(const char* from, int64_t lines, int64_t width = LINE) {
#if defined(__SANITIZE_ADDRESS__)
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t byte = 0; byte < width; byte += width - 1)
            static_cast<void>(*static_cast<const volatile char*>(from + line * LINE + byte));
#else
    static_cast<void>(from), static_cast<void>(lines), static_cast<void>(width);
#endif
}

#define LLM_TILE_LOAD(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define LLM_TILE_STORE(tile, to, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
#define LLM_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile::: "memory")
#define LLM_TILE_DOT_BF16(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum::: "memory")
#define LLM_TILE_DOT_INT8(sum, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum::: "memory")

// Configures the thread's tiles and releases them at the end: tmm0-3 sums, tmm4-6 operands, tmm7 weights.
class TileShapes {
    int64_t rows_ = 0;

  public:
    // `depth`: bytes of k that an instruction takes of a line; the same in every call.
    void set(int64_t rows, int64_t depth = LINE) {
        if (rows == rows_) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE};
            uint8_t lines[16] = {};
        } shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.lines[tile] = static_cast<uint8_t>(tile == 7 ? depth / 4 : rows);
            if (tile >= 4 && tile < 7) shapes.bytes[tile] = static_cast<uint16_t>(depth);
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
        rows_ = rows;
    }
    TileShapes() = default;
    ~TileShapes() { asm volatile("tilerelease" ::: "memory"); }
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
};

// What a block's steps prefetch while they multiply: `lines` lines per step of each panel, starting at `weights`, and
// `skip` bytes further from step `last` on. `soon`: into the L1 cache, else L2.
struct PrefetchPlan {
    const char* weights;
    int64_t stride, lines;  // stride: bytes between panels
    int64_t last, skip;
    bool soon;

    LLM_INLINE void fetch(int64_t step, int64_t panel) const {
        const char* at = weights + panel * stride + step * lines * LINE + (step < last ? 0 : skip);
        for (int64_t line = 0; line < lines; ++line) soon ? prefetch(at + line * LINE) : prefetch_far(at + line * LINE);
    }
};
inline constexpr PrefetchPlan NO_PREFETCH{nullptr, 0, 0, 0, 0, false};

// The operand formats: int8, three bfloat16 parts (exact), or the nearest bfloat16.
enum Form { INT8, BF16_PARTS, BF16_ROUNDED };
constexpr int parts_of(Form form) { return form == BF16_PARTS ? 3 : 1; }

// Adds `steps` steps to the sums of panels 0 ... PANELS - 1.
template <Form FORM, int PANELS>
LLM_INLINE void add_steps(const char* a, int64_t a_tile, const char* b, int64_t panel_bytes, int64_t steps,
                          const PrefetchPlan& prefetched) {
    constexpr int PARTS = parts_of(FORM);
#define LLM_TILE_PANEL(panel)                                       \
    if constexpr (PANELS > panel) {                                 \
        const char* at = b + panel * panel_bytes;                   \
        prefetched.fetch(step, panel);                              \
        touch(at, TILE_LINES);                                      \
        LLM_TILE_LOAD(7, at, LINE);                                 \
        if constexpr (FORM == INT8) LLM_TILE_DOT_INT8(panel, 4, 7); \
        else LLM_TILE_DOT_BF16(panel, 4, 7);                        \
        if constexpr (FORM == BF16_PARTS) {                         \
            LLM_TILE_DOT_BF16(panel, 5, 7);                         \
            LLM_TILE_DOT_BF16(panel, 6, 7);                         \
        }                                                           \
    }
    for (int64_t step = 0; step < steps; ++step, a += PARTS * a_tile, b += TILE_BYTES) {
        touch(a, PARTS * a_tile / LINE);
        LLM_TILE_LOAD(4, a, LINE);
        if constexpr (PARTS == 3) {
            LLM_TILE_LOAD(5, a + a_tile, LINE);
            LLM_TILE_LOAD(6, a + 2 * a_tile, LINE);
        }
        LLM_TILE_PANEL(0)
        LLM_TILE_PANEL(1)
        LLM_TILE_PANEL(2)
        LLM_TILE_PANEL(3)
    }
#undef LLM_TILE_PANEL
}

// Sums of PANELS panels between tiles and memory, [rows][TILE_PANELS][16] of 4 bytes.
template <int PANELS> LLM_INLINE void load_sums(const void* sums) {
    const char* at = static_cast<const char*>(sums);
    LLM_TILE_LOAD(0, at, TILE_PANELS * LINE);
    if constexpr (PANELS > 1) LLM_TILE_LOAD(1, at + LINE, TILE_PANELS * LINE);
    if constexpr (PANELS > 2) LLM_TILE_LOAD(2, at + 2 * LINE, TILE_PANELS * LINE);
    if constexpr (PANELS > 3) LLM_TILE_LOAD(3, at + 3 * LINE, TILE_PANELS * LINE);
}
template <int PANELS> LLM_INLINE void store_sums(void* sums) {
    char* at = static_cast<char*>(sums);
    LLM_TILE_STORE(0, at, TILE_PANELS * LINE);
    if constexpr (PANELS > 1) LLM_TILE_STORE(1, at + LINE, TILE_PANELS * LINE);
    if constexpr (PANELS > 2) LLM_TILE_STORE(2, at + 2 * LINE, TILE_PANELS * LINE);
    if constexpr (PANELS > 3) LLM_TILE_STORE(3, at + 3 * LINE, TILE_PANELS * LINE);
}
LLM_INLINE void clear_sums() {
    LLM_TILE_ZERO(0);
    LLM_TILE_ZERO(1);
    LLM_TILE_ZERO(2);
    LLM_TILE_ZERO(3);
}

// The operands of a block of batch rows, cut into blocks of `block` steps of k.
struct TileOperands {
    char* data;
    int64_t rows, steps, parts, block;

    int64_t tiles() const { return ceil_div(rows, TILE_LINES); }
    int64_t tile_rows(int64_t tile) const { return min(TILE_LINES, rows - tile * TILE_LINES); }
    int64_t block_steps(int64_t first) const { return min(block, steps - first); }
    // The operands of row tile `tile` in the block that begins at step `first`.
    char* at(int64_t tile, int64_t first) const {
        return data + (first * rows + tile * TILE_LINES * block_steps(first)) * parts * LINE;
    }
    // Calls write(step, line, bytes between the lines of two parts) for each step of a batch row.
    template <class Write> LLM_INLINE void write_row(int64_t row, const Write& write) const {
        const int64_t tile = row / TILE_LINES, part = tile_rows(tile) * LINE;
        for (int64_t first = 0; first < steps; first += block) {
            char* line = at(tile, first) + row % TILE_LINES * LINE;
            for (int64_t step = first; step < first + block_steps(first); ++step, line += parts * part)
                write(step, line, part);
        }
    }
    static int64_t bytes(int64_t rows, int64_t steps, int64_t parts) { return rows * steps * parts * LINE; }
};

// Quantizes batch rows x [a.rows][k] to int8 operands; `scales` receives the factor of each row's sums (quantize.h).
// `rotation`: of the weight (rotate.h).
inline void quantize_operands(const TileOperands& a, const float* x, int64_t k, int64_t rotation, float input_scale,
                              int64_t offset, float* scales, int64_t threads) {
    const int64_t one = a.rows * k < SERIAL_ELEMENTS ? 1 : threads, rotated = rotation ? k * sizeof(float) : 0;
    parallel_for(a.rows, one, rotated, [&](int64_t row, char* scratch) {
        const float* at = x + row * k;
        if (rotation) {
            float* room = reinterpret_cast<float*>(scratch);
            rotate_row(at, room, k, rotation);
            at = room;
        }
        const RowQuantizer by(at, k, input_scale, offset);
        scales[row] = by.factor;
        a.write_row(row, [&](int64_t step, char* line, int64_t) {
            const float* from_here = at + step * LINE;
            const int64_t left = k - step * LINE;
            int8_t* to = reinterpret_cast<int8_t*>(line);
            if (left >= LINE)
                LLM_UNROLL for (int64_t i = 0; i < LINE; i += LANES)
                    store_int8(to + i, by.quantize(load(from_here + i)));
            else
                for (int64_t i = 0; i < LINE; i += LANES)
                    store_int8(to + i, by.quantize(load_part(from_here + i, left - i)));
        });
    });
}

// Steps of a group of panels: `whole` steps from `data` on, panels `stride` bytes apart, then `last`, padded, if not
// null.
struct TileSteps {
    const char* data;
    int64_t stride, whole;
    const char* last;  // [panels][TILE_BYTES], or null
};

// The packed weights of some steps, to be prefetched: `lines` lines per panel, panels `stride` bytes apart.
struct StoredSteps {
    const char* data;
    int64_t stride, lines;
};

// Panels that tiles can load in place: bfloat16 and int8, `lines` lines of 64 bytes each.
struct TilePanels {
    const char* data;
    int64_t lines;
    static constexpr bool IN_PLACE = true;

    int64_t steps() const { return ceil_div(lines, TILE_LINES); }
    int64_t scratch_bytes(int64_t) const { return TILE_PANELS * TILE_BYTES; }
    TileSteps open(int64_t panel, int64_t wide, int64_t first, int64_t count, char* scratch) const {
        const int64_t stride = lines * LINE, whole = min(count, lines / TILE_LINES - first);
        const char* from = data + panel * stride + first * TILE_BYTES;
        if (whole == count) return {from, stride, whole, nullptr};
        std::memset(scratch, 0, wide * TILE_BYTES);  // pads the last step
        for (int64_t c = 0; c < wide; ++c)
            std::memcpy(scratch + c * TILE_BYTES, from + c * stride + whole * TILE_BYTES, lines % TILE_LINES * LINE);
        return {from, stride, whole, scratch};
    }
    StoredSteps stored(int64_t panel, int64_t first, int64_t count) const {
        const int64_t begin = first * TILE_LINES;
        return {data + (panel * lines + begin) * LINE, lines * LINE, min(count * TILE_LINES, lines - begin)};
    }
};

// sums (+)= operands x panels, for one block of steps, one row tile and one group of panels.
template <Form FORM, int PANELS>
void add_block(TileShapes& shapes, const TileOperands& a, int64_t tile, int64_t first, const TileSteps& b, char* sums,
               const PrefetchPlan& prefetched) {
    constexpr int PARTS = parts_of(FORM);
    const int64_t operand = a.tile_rows(tile) * LINE;
    const char* operands = a.at(tile, first);
    shapes.set(a.tile_rows(tile));
    if (first) load_sums<PANELS>(sums);
    else clear_sums();
    add_steps<FORM, PANELS>(operands, operand, b.data, b.stride, b.whole, prefetched);
    if (b.last)
        add_steps<FORM, PANELS>(operands + b.whole * PARTS * operand, operand, b.last, TILE_BYTES, 1, NO_PREFETCH);
    store_sums<PANELS>(sums);
}

// Multiplies a block of batch rows by all panels. Calls done(row tile, first panel, panels, sums
// [rows][TILE_PANELS][16]) for each finished tile; `done` may overwrite the sums.
template <Form FORM, class Panels, class Done>
void multiply_tiles(const TileOperands& a, const Panels& b, int64_t panels, int64_t threads, const Done& done) {
    constexpr int64_t tile_bytes = TILE_LINES * TILE_PANELS * LINE;
    const int64_t groups = ceil_div(panels, TILE_PANELS), tiles = a.tiles();
    // With long blocks of steps, a task takes several groups of panels: it reads its operands from cache for all of
    // them.
    int64_t share = a.steps > a.block && a.block == BLOCK_STEPS && tiles > 1 ? groups / threads : 1;
    share = max(1, min(share, MOST_GROUPS));
    const int64_t kept = share * tiles * tile_bytes;
    parallel_for(ceil_div(groups, share), threads, kept + b.scratch_bytes(a.block), [&](int64_t task, char* scratch) {
        TileShapes shapes;
        const int64_t begin = task * share, end = min(begin + share, groups);
        // The weights that this thread reads after (group, block of steps).
        const auto next = [&](int64_t group, int64_t first) {
            if (++group == end && first + a.block < a.steps) group = begin, first += a.block;
            else if (group == end) first = 0;
            return group < groups ? b.stored(group * TILE_PANELS, first, a.block_steps(first))
                                  : StoredSteps{nullptr, 0, 0};
        };
        for (int64_t first = 0; first == 0 || first < a.steps; first += a.block)
            for (int64_t group = begin; group < end; ++group) {
                const int64_t panel = group * TILE_PANELS, wide = min(TILE_PANELS, panels - panel);
                const TileSteps steps = b.open(panel, wide, first, a.block_steps(first), scratch + kept);
                const StoredSteps after = next(group, first);
                const int64_t part = ceil_div(after.lines, tiles),
                              lines = ceil_div(part, steps.whole > 0 ? steps.whole : 1);
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    // One row tile is bound by memory: it prefetches its own panels a little ahead. Several row tiles
                    // have time to prefetch what comes next: each fetches its part.
                    const PrefetchPlan prefetched =
                        Panels::IN_PLACE && tiles == 1
                            ? PrefetchPlan{steps.data + TILE_AHEAD,
                                           steps.stride,
                                           TILE_LINES,
                                           steps.whole - TILE_AHEAD / TILE_BYTES,
                                           (wide - 1) * steps.stride,
                                           true}
                            : PrefetchPlan{after.data + tile * part * LINE, after.stride, lines, steps.whole, 0, false};
                    char* sums = scratch + ((group - begin) * tiles + tile) * tile_bytes;
                    if (wide == 4) add_block<FORM, 4>(shapes, a, tile, first, steps, sums, prefetched);
                    else if (wide == 3) add_block<FORM, 3>(shapes, a, tile, first, steps, sums, prefetched);
                    else if (wide == 2) add_block<FORM, 2>(shapes, a, tile, first, steps, sums, prefetched);
                    else add_block<FORM, 1>(shapes, a, tile, first, steps, sums, prefetched);
                    if (first + a.block >= a.steps) done(tile, panel, wide, sums);
                }
            }
    });
}

// Calls run(operands, first batch row) for each block of row tiles; all blocks share one buffer.
template <class Run>
void for_row_blocks(int64_t m, int64_t steps, int64_t parts, int64_t block, int64_t most_tiles, const Run& run) {
    const int64_t fitting = OPERAND_BYTES / (steps * parts * TILE_BYTES + 1);
    const int64_t tiles = max(LEAST_TILES, min(fitting, most_tiles));
    const int64_t blocks = ceil_div(m, tiles * TILE_LINES);
    const int64_t most = min(m, ceil_div(m, TILE_LINES * (blocks ? blocks : 1)) * TILE_LINES);
    const Scratch memory(TileOperands::bytes(most, steps, parts));
    for (int64_t from = 0; from < m; from += most)
        run(TileOperands{memory.as<char>(), min(most, m - from), steps, parts, block}, from);
}

}  // namespace
}  // namespace llm

#endif
