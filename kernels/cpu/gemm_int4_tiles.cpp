// The int4 GEMM with AMX tiles (int4.h): panels are unpacked to int8, one block of steps at a time.
#include "gemm_tiles.h"
#include "int4.h"
#include "quantize.h"

#if LLM_TILES

namespace llm {
namespace {

constexpr int64_t TILE_K = 64;         // k of a step of tiles
constexpr int64_t GROUPED_STEPS = 16;  // with groups: an unpacked panel stays in the L1 cache

// Whether AMX tiles are faster than vectors; the bits are the same.
bool uses_tiles(int64_t m, int64_t groups, int64_t group_size) {
    if (groups <= 1 || group_size % TILE_K == 0) return m >= 17;
    return group_size % (TILE_K / 2) == 0 && m >= 25;
}

// Unpacks panels to int8, one block of steps at a time: a line of nibbles becomes two lines of a tile.
struct NibblePanels {
    const uint8_t* data;
    int64_t lines;  // of nibbles, in a panel
    static constexpr bool IN_PLACE = false;

    int64_t steps() const { return ceil_div(2 * lines, TILE_LINES); }
    int64_t scratch_bytes(int64_t block) const { return TILE_PANELS * block * TILE_BYTES; }
    TileSteps open(int64_t panel, int64_t wide, int64_t first, int64_t count, char* scratch) const {
        const int64_t begin = first * TILE_LINES / 2, end = min(lines, (first + count) * TILE_LINES / 2);
        const __m512i mask = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
        for (int64_t c = 0; c < wide; ++c) {
            char* to = scratch + c * count * TILE_BYTES;
            const uint8_t* from = data + ((panel + c) * lines + begin) * PANEL_STEP;
            for (int64_t line = begin; line < end; ++line, from += PANEL_STEP, to += 2 * LINE) {
                const __m512i both = _mm512_loadu_si512(from);
                _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, mask), eight));
                _mm512_store_si512(to + LINE,
                                   _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), eight));
            }
            std::memset(to, 0, scratch + (c + 1) * count * TILE_BYTES - to);
        }
        return {scratch, count * TILE_BYTES, count, nullptr};
    }
    StoredSteps stored(int64_t panel, int64_t first, int64_t count) const {
        const int64_t begin = first * TILE_LINES / 2, end = min(lines, (first + count) * TILE_LINES / 2);
        return {reinterpret_cast<const char*>(data) + (panel * lines + begin) * PANEL_STEP, lines * PANEL_STEP,
                end - begin};
    }
};

// Batch rows of int8 operands, their groups kept as [row tile][groups][16].
void quantize_groups(const Int4Product& p, const TileOperands& a, const float* x, const InputMemory& kept,
                     int64_t threads) {
    const int64_t size = p.groups == 1 ? p.k : p.group_size, padded = a.steps * LINE;
    parallel_for(a.rows, a.rows * p.k < SERIAL_ELEMENTS ? 1 : threads, padded, [&](int64_t row, char* scratch) {
        const float* at = x + row * p.k;
        int8_t* q = reinterpret_cast<int8_t*>(scratch);
        std::memset(q + p.k, 0, padded - p.k);
        for (int64_t group = 0; group < p.groups; ++group) {
            const int64_t first = group * size, end = min(p.k, first + size);
            const RowQuantizer by(at + first, end - first, 0.0f, 0);
            I32 sums = set1_i(0);
            for (int64_t i = first; i < end; i += LANES) {
                const I32 some = by.quantize(load_part(at + i, end - i));
                alignas(16) int8_t bytes[LANES];
                store_int8(bytes, some);
                std::memcpy(q + i, bytes, min(LANES, end - i));
                sums = sums + some;
            }
            const int64_t tile = row / TILE_LINES * p.groups + group;
            kept.keep(tile * TILE_LINES + row % TILE_LINES, by.factor, sum(sums));
        }
        a.write_row(row, [&](int64_t step, char* line, int64_t) { std::memcpy(line, q + step * LINE, LINE); });
    });
}

// One group: sums stay exact to the end of k.
void multiply_channels(const Int4Product& p, const TileOperands& a, int64_t from, int64_t threads) {
    const NibblePanels panels{p.panel(0), p.steps()};
    multiply_tiles<INT8>(a, panels, p.panels(), threads, [&](int64_t tile, int64_t panel, int64_t wide, char* sums) {
        const int64_t stride = TILE_PANELS * LANES;
        for (int64_t c = 0; c < wide; ++c) {
            float* at = reinterpret_cast<float*>(sums) + c * LANES;
            for (int64_t r = 0; r < a.tile_rows(tile); ++r) {
                alignas(64) int32_t exact[LANES];
                std::memcpy(exact, at + r * stride, sizeof exact);
                store(at + r * stride, zero());
                p.add_groups<1>(0, (panel + c) * LANES, p.inputs.from(tile * TILE_LINES + r), 0, 1, exact, 0,
                                at + r * stride, 0);
            }
            p.finish(from + tile * TILE_LINES, a.tile_rows(tile), panel + c, at, stride);
        }
    });
}

// Several groups: one row tile and one panel at a time, so that the float sums of the groups so far, [16][16], stay in
// registers. A group's exact sums leave the tile at once. An instruction takes `depth` of k: 64, or 32 (half a line) if
// the group size is an odd multiple of 32.
class GroupTiles {
    const Int4Product& p;
    const TileOperands& a;
    const int64_t depth;

    static int64_t depth_of(const Int4Product& p) { return p.group_size % TILE_K ? TILE_K / 2 : TILE_K; }

    // Adds the groups of the block of steps that begins at `first` to `total`; each group prefetches a part of
    // `prefetched`.
    void add(TileShapes& shapes, int64_t tile, int64_t first, int64_t panel, const char* opened, float* total,
             const PrefetchPlan& prefetched) const {
        alignas(64) int32_t sums[TILE_LINES * LANES] = {};
        F32 so_far[TILE_LINES];
        LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r) so_far[r] = first ? load(total + r * LANES) : zero();
        shapes.set(a.tile_rows(tile), depth);
        const char* operands = a.at(tile, first);
        const int64_t operand = a.tile_rows(tile) * LINE, of_group = p.group_size / depth;
        const int64_t end = ceil_div(min(a.block_steps(first) * TILE_K, p.padded_k() - first * TILE_K), depth);
        int64_t group = first * TILE_K / p.group_size;
        for (int64_t dot = 0, turn = 0; dot < end; ++group, ++turn) {
            prefetched.fetch(turn, 0);
            LLM_TILE_ZERO(0);
            for (const int64_t last = min(end, dot + of_group); dot < last; ++dot) {
                const char *at = operands + dot * depth / TILE_K * operand + dot * depth % TILE_K,
                           *b = opened + dot * depth * LANES;
                touch(at, a.tile_rows(tile), depth), touch(b, depth / 4);
                LLM_TILE_LOAD(4, at, LINE);
                LLM_TILE_LOAD(7, b, LINE);
                LLM_TILE_DOT_INT8(0, 4, 7);
            }
            LLM_TILE_STORE(0, sums, LINE);
            // As Int4Product::add_groups, in registers.
            const GroupInputs of = p.inputs.from((tile * p.groups + group) * TILE_LINES);
            const F32 scale = p.group_scale(group, panel * LANES);
            LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r)
                so_far[r] = fma(to_float(load_i(sums + r * LANES)) * set1(of.scale[r]), scale, so_far[r]);
            if (p.is_shifted()) {
                const F32 offset = p.group_offset(group, panel * LANES, scale);
                LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r) so_far[r] = fma(offset, set1(of.sum[r]), so_far[r]);
            }
        }
        LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r) store(total + r * LANES, so_far[r]);
    }

  public:
    GroupTiles(const Int4Product& product, const TileOperands& operands)
        : p(product), a(operands), depth(depth_of(product)) {}

    // Steps of k in a block, which holds whole groups.
    static int64_t block_steps(const Int4Product& p) {
        const int64_t unit = p.group_size / depth_of(p);
        return unit < GROUPED_STEPS ? GROUPED_STEPS / unit * unit : unit;
    }

    void multiply(int64_t from, int64_t threads) const {
        const NibblePanels weights{p.panel(0), p.steps()};
        const int64_t panels = p.panels(), tiles = a.tiles(), tile_floats = TILE_LINES * LANES;
        const int64_t share = ceil_div(panels, threads * ceil_div(panels, threads * MOST_GROUPS * TILE_PANELS));
        const int64_t kept_panels = a.steps > a.block ? share : 1,
                      kept = kept_panels * tiles * tile_floats * sizeof(float);
        parallel_for(ceil_div(panels, share), threads, kept + a.block * TILE_BYTES, [&](int64_t task, char* scratch) {
            TileShapes shapes;
            float* totals = reinterpret_cast<float*>(scratch);
            const int64_t begin = task * share, end = min(panels, begin + share);
            for (int64_t first = 0; first < a.steps; first += a.block)
                for (int64_t panel = begin; panel < end; ++panel) {
                    const TileSteps opened = weights.open(panel, 1, first, a.block_steps(first), scratch + kept);
                    // Each row tile prefetches its part of what this thread unpacks next.
                    const bool is_last = panel + 1 == end;
                    const int64_t then = is_last ? first + a.block : first;
                    const StoredSteps after = then < a.steps ? weights.stored(is_last ? begin : panel + 1, then,
                                                                              a.block_steps(then))
                                                             : StoredSteps{nullptr, 0, 0};
                    const int64_t part = ceil_div(after.lines, tiles);
                    const int64_t turns = ceil_div(a.block_steps(first) * TILE_K, p.group_size);
                    for (int64_t tile = 0; tile < tiles; ++tile) {
                        float* total = totals + ((panel - begin) % kept_panels * tiles + tile) * tile_floats;
                        const PrefetchPlan prefetched{
                            after.data + tile * part * LINE, 0, ceil_div(part, turns), turns, 0, false};
                        add(shapes, tile, first, panel, opened.data, total, prefetched);
                        if (first + a.block >= a.steps)
                            p.finish(from + tile * TILE_LINES, a.tile_rows(tile), panel, total, LANES);
                    }
                }
        });
    }
};

}  // namespace

bool linear_int4_by_tiles(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    Int4Product p({weight, x, y, m});
    if (p.groups == 0 || !uses_tiles(m, p.groups, p.group_size)) return false;
    const int64_t block = p.groups > 1 ? GroupTiles::block_steps(p) : SHORT_STEPS;
    // With groups one panel is read at a time, and fewer row tiles fit beside it.
    const int64_t most_tiles = p.groups > 1 ? LEAST_TILES : MOST_TILES;
    for_row_blocks(p.m, ceil_div(p.k, TILE_K), 1, block, most_tiles, [&](const TileOperands& a, int64_t from) {
        const InputMemory kept(a.tiles() * TILE_LINES, p.groups);
        quantize_groups(p, a, p.x + from * p.k, kept, threads);
        p.inputs = kept.inputs();
        if (p.groups > 1) GroupTiles(p, a).multiply(from, threads);
        else multiply_channels(p, a, from, threads);
    });
    return true;
}

}  // namespace llm

#endif
