// y = x W^T (+ bias) with int4 weights and activations quantized here to int8: exact int32 sums per group of k, groups added
// in order in float32.
//
// A panel is [k / 8][16][4]: in byte j of a column, weight k + j plus 8 in the low nibble and weight k + 4 + j plus 8 in the
// high one, so that a mask and a shift give four unsigned bytes of consecutive k. The sums start at -8 times the sum of the
// activations, which takes the 8 back. k is padded with activations of 0.
#include "bytes.h"
#include "gemm_tiles.h"
#include "panels.h"
#include "quantize.h"
#include "replay.h"

namespace llm {
namespace {

constexpr int64_t STEP = 8;                 // k of one step
constexpr int64_t PANEL_STEP = LANES * 4;   // bytes of a panel per step
constexpr int64_t PREFETCH_BYTES = 2048;
constexpr int64_t BLOCK_BYTES = 512 << 10;

enum ScaleKind : int64_t { SCALE_FLOAT32 = 0, SCALE_BFLOAT16 = 1, SCALE_FLOAT16 = 2 };

struct Product {
    const int8_t* a;         // of each tile, [k / 8][rows][8]
    const int32_t* start;    // of each tile, [groups][rows]: -8 times the sum of a group's activations
    const float* row_scale;  // [m]
    const uint8_t* weight;
    const void* scale;  // [groups][scale_stride], of `scale_kind`
    int64_t scale_kind, scale_stride;
    const float* bias;  // [n] or null
    float* y;
    int64_t m, n, padded_k, groups, group_steps;

    int64_t steps() const { return padded_k / STEP; }
    int64_t group_size() const { return group_steps * STEP; }
    int64_t panel_bytes() const { return padded_k * LANES / 2; }
    LLM_INLINE F32 group_scale(int64_t group, int64_t column) const {
        const int64_t at = group * scale_stride + column, count = n - column;
        if (scale_kind == SCALE_FLOAT32) return part(static_cast<const float*>(scale) + at, count);
        if (scale_kind == SCALE_FLOAT16) return part(static_cast<const F16*>(scale) + at, count);
        return part(static_cast<const BF16*>(scale) + at, count);
    }
    template <class T> LLM_INLINE F32 part(const T* p, int64_t count) const {
        prefetch(p + 4 * LANES);  // of a later panel: they come from memory one line at a time
        return load_part(p, count);
    }
};

// `sums` below: [rows][PANELS][16] floats, the groups' sums so far; added to, never in registers for longer than a group.

// On AVX2 so many tiles and more read panels that were opened once, into [k / 4][16][4] unsigned bytes.
constexpr int64_t OPENED_FROM = 8;
constexpr int64_t OPENED_STEP = 2 * PANEL_STEP;

// nibbles(p, high): unsigned bytes, of the k in the low nibbles or of those in the high ones.
#if LLM_AVX512
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    const Bytes both = load_bytes(p);
    return _mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}
#elif LLM_AVX2
alignas(32) constexpr uint8_t LOW_NIBBLES[32] = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
                                                 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};
// The mask stays in memory: 12 sums, 2 vectors of weights, a broadcast and a product are all 16 registers.
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    Bytes out = load_256(p);
    if (high) out = _mm256_srli_epi16(out, 4);
    asm volatile("vpand %1, %0, %0" : "+v"(out) : "m"(LOW_NIBBLES));
    return out;
}
#endif

#if LLM_VNNI

// `opened`: the panel, when OPENED.
template <int ROWS, int PANELS, bool OPENED = false>
__attribute__((noinline)) void add_groups(const Product& p, const int8_t* a, const int32_t* start, int64_t panel, float* sums,
                                          const uint8_t* opened = nullptr) {
    constexpr int vectors = PANELS * PANEL_VECTORS;
    const int64_t bytes = p.panel_bytes();
    const Ahead ahead(PREFETCH_BYTES, PANEL_STEP, p.steps(), PANELS, bytes);
    const uint8_t* b = p.weight + panel * bytes;
    int64_t s = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
        Bytes acc[ROWS][vectors];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r)
            LLM_UNROLL for (int c = 0; c < vectors; ++c) acc[r][c] = broadcast_bytes(start + group * ROWS + r);
        const int64_t end = Tasks::least(p.steps(), (group + 1) * p.group_steps);
        for (; s < end; ++s) {
            const int64_t distance = ahead.distance(s);
            const uint8_t* at = b + s * PANEL_STEP;
            if (!OPENED) LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(at + c * bytes + distance);
            LLM_UNROLL for (int half = 0; half < 2; ++half) {
                Bytes w[vectors];
                LLM_UNROLL for (int c = 0; c < vectors; ++c)
                    w[c] = OPENED ? load_bytes(opened + s * OPENED_STEP + half * PANEL_STEP + c * sizeof(Bytes))
                                  : nibbles(at + c / PANEL_VECTORS * bytes + c % PANEL_VECTORS * sizeof(Bytes), half);
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                    const Bytes value = broadcast_bytes(a + (s * ROWS + r) * STEP + half * 4);
                    LLM_UNROLL for (int c = 0; c < vectors; ++c) dot(acc[r][c], w[c], value);
                }
            }
        }
        alignas(64) int32_t exact[ROWS][PANELS * LANES];
        std::memcpy(exact, acc, sizeof exact);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) {
            const F32 scale = p.group_scale(group, (panel + c) * LANES);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                float* at = sums + (r * PANELS + c) * LANES;
                store(at, fma(to_float(load_i(exact[r] + c * LANES)), scale, load(at)));
            }
        }
    }
}

#elif defined(LLM_PLAIN)

constexpr int panels_for(int) { return 1; }

template <int ROWS, int PANELS>
void add_groups(const Product& p, const int8_t* a, const int32_t* start, int64_t panel, float* sums) {
    const uint8_t* b = p.weight + panel * p.panel_bytes();
    int64_t s = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
        int32_t acc[ROWS][LANES];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < LANES; ++c) acc[r][c] = start[group * ROWS + r];
        for (const int64_t end = Tasks::least(p.steps(), (group + 1) * p.group_steps); s < end; ++s)
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < LANES; ++c)
                    for (int j = 0; j < 4; ++j) {
                        const int both = b[s * PANEL_STEP + c * 4 + j];
                        const int8_t* at = a + (s * ROWS + r) * STEP + j;
                        acc[r][c] += (both & 15) * at[0] + (both >> 4) * at[4];
                    }
        const F32 scale = p.group_scale(group, panel * LANES);
        for (int r = 0; r < ROWS; ++r)
            store(sums + r * LANES, fma(to_float(load_i(acc[r])), scale, load(sums + r * LANES)));
    }
}

#else

// Unsigned times signed bytes in pairs, added in int16 over 32 k: at most 16 * 15 * 128 = 30720 in magnitude.
#if LLM_AVX512
LLM_INLINE I32 pairs(const Bytes* x) { return {_mm512_madd_epi16(x[0], _mm512_set1_epi16(1))}; }
#else
LLM_INLINE I32 pairs(const Bytes* x) {
    const Bytes one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(x[0], one), _mm256_madd_epi16(x[1], one)};
}
#endif
LLM_INLINE void multiply(Bytes& sum, Bytes w, Bytes a) { asm volatile("vpmaddubsw %2, %1, %0" : "=v"(sum) : "v"(w), "v"(a)); }
LLM_INLINE void multiply_add(Bytes& sum, Bytes w, Bytes a) {
    Bytes product;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(w), "v"(a));
}

// Few rows wait for memory: they take turns at several panels, so that as many streams are under way.
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 1; }
constexpr int64_t STEPS_IN_WORDS = 4;

template <bool OPENED> LLM_INLINE Bytes load_weights(const uint8_t* b, int step, int half, int vector) {
    if (!OPENED) return nibbles(b + step * PANEL_STEP + vector * sizeof(Bytes), half);
    return load_bytes(b + step * OPENED_STEP + half * PANEL_STEP + vector * sizeof(Bytes));
}

// Up to 4 steps, summed in int16.
template <int ROWS, int STEPS, bool OPENED>
LLM_INLINE void few_steps(const int8_t* a, const uint8_t* b, int64_t distance, Bytes (&words)[ROWS][PANEL_VECTORS]) {
    LLM_UNROLL for (int s = 0; s < STEPS; ++s) {
        if (!OPENED) prefetch(b + s * PANEL_STEP + distance);
        LLM_UNROLL for (int half = 0; half < 2; ++half) {
            Bytes w[PANEL_VECTORS];
            LLM_UNROLL for (int c = 0; c < PANEL_VECTORS; ++c) w[c] = load_weights<OPENED>(b, s, half, c);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                const Bytes value = broadcast_bytes(a + (s * ROWS + r) * STEP + half * 4);
                LLM_UNROLL for (int c = 0; c < PANEL_VECTORS; ++c) {
                    if (s == 0 && half == 0) multiply(words[r][c], w[c], value);
                    else multiply_add(words[r][c], w[c], value);
                }
            }
        }
    }
}

// `opened`: the panel, when OPENED.
template <int ROWS, int PANELS, bool OPENED = false>
__attribute__((noinline)) void add_groups(const Product& p, const int8_t* a, const int32_t* start, int64_t panel, float* sums,
                                          const uint8_t* opened = nullptr) {
    const int64_t bytes = p.panel_bytes();
    const Ahead ahead(PREFETCH_BYTES, PANEL_STEP, p.steps(), PANELS, bytes);
    alignas(64) int32_t group_sums[ROWS * PANELS * LANES];
    int64_t s = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
        const int64_t end = Tasks::least(p.steps(), (group + 1) * p.group_steps);
        for (bool first = true; first || s < end; first = false) {
            const int64_t some = end - s < STEPS_IN_WORDS ? 1 : STEPS_IN_WORDS, distance = ahead.distance(s);
            const int8_t* at = a + s * ROWS * STEP;
            const bool last = s + some >= end;
            for (int c = 0; c < PANELS; ++c) {
                const uint8_t* b = OPENED ? opened + s * OPENED_STEP : p.weight + (panel + c) * bytes + s * PANEL_STEP;
                Bytes words[ROWS][PANEL_VECTORS];
                if (some == STEPS_IN_WORDS) few_steps<ROWS, STEPS_IN_WORDS, OPENED>(at, b, distance, words);
                else few_steps<ROWS, 1, OPENED>(at, b, distance, words);
                I32 sum[ROWS];
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                    const I32 before = first ? set1_i(start[group * ROWS + r]) : load_i(group_sums + (r * PANELS + c) * LANES);
                    sum[r] = before + pairs(words[r]);
                }
                if (last) {
                    const F32 scale = p.group_scale(group, (panel + c) * LANES);
                    LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                        float* into = sums + (r * PANELS + c) * LANES;
                        store(into, fma(to_float(sum[r]), scale, load(into)));
                    }
                } else {
                    LLM_UNROLL for (int r = 0; r < ROWS; ++r) store_i(group_sums + (r * PANELS + c) * LANES, sum[r]);
                }
            }
            s += some;
        }
    }
}

#endif

// y = sums * row scale (+ bias) for a panel and `rows` rows, whose sums are `stride` floats apart.
LLM_INLINE void finish(const Product& p, int64_t row, int64_t rows, int64_t panel, const float* sums, int64_t stride) {
    const int64_t column = panel * LANES, columns = p.n - column;
    const F32 bias = p.bias ? load_part(p.bias + column, columns) : zero();
    for (int64_t r = 0; r < rows; ++r) {
        const F32 product = load(sums + r * stride) * set1(p.row_scale[row + r]);
        store_part(p.y + (row + r) * p.n + column, p.bias ? product + bias : product, columns);
    }
}

template <int ROWS, int PANELS> void tile(const Product& p, int64_t row, int64_t panel) {
    alignas(64) float sums[ROWS * PANELS * LANES] = {};
    add_groups<ROWS, PANELS>(p, p.a + row * p.padded_k, p.start + row * p.groups, panel, sums);
    for (int c = 0; c < PANELS; ++c) finish(p, row, ROWS, panel + c, sums + c * LANES, PANELS * LANES);
}

template <int ROWS> void tiles(const Product& p, int64_t row, int64_t panel, int64_t end) {
    constexpr int wide = panels_for(ROWS);
    for (; panel + wide <= end; panel += wide) tile<ROWS, wide>(p, row, panel);
    if (wide > 1)
        for (; panel < end; ++panel) tile<ROWS, 1>(p, row, panel);
}

#if LLM_AVX2
void open_panel(const uint8_t* panel, int64_t steps, uint8_t* opened) {
    for (int64_t s = 0; s < steps; ++s) {
        prefetch(panel + s * PANEL_STEP + PREFETCH_BYTES);
        LLM_UNROLL for (int i = 0; i < 2 * PANEL_VECTORS; ++i) {
            const Bytes w = nibbles(panel + s * PANEL_STEP + i % PANEL_VECTORS * sizeof(Bytes), i >= PANEL_VECTORS);
            std::memcpy(opened + s * OPENED_STEP + i * sizeof(Bytes), &w, sizeof w);
        }
    }
}

template <int ROWS> void opened_tiles(const Product& p, int64_t row, int64_t panel, int64_t end, const uint8_t* opened) {
    for (; panel < end; ++panel, opened += p.steps() * OPENED_STEP) {
        alignas(64) float sums[ROWS * LANES] = {};
        add_groups<ROWS, 1, true>(p, p.a + row * p.padded_k, p.start + row * p.groups, panel, sums, opened);
        finish(p, row, ROWS, panel, sums, LANES);
    }
}
#endif

void run_tiles(const Product& p, const Tasks& tasks) {
#if LLM_AVX2
    if (tasks.block_tiles() >= OPENED_FROM) {
        const int64_t size = p.steps() * OPENED_STEP;
        const auto open = [&](int64_t panel, int64_t end, char* scratch) {
            for (uint8_t* to = reinterpret_cast<uint8_t*>(scratch); panel < end; ++panel, to += size)
                open_panel(p.weight + panel * p.panel_bytes(), p.steps(), to);
        };
        return tasks.run(tasks.group_panels() * size, open, [&](int64_t tile, int64_t panel, int64_t end, const char* scratch) {
            const uint8_t* opened = reinterpret_cast<const uint8_t*>(scratch);
            with_rows(tasks.rows(tile), [&](auto rows) {
                opened_tiles<decltype(rows)::value>(p, tasks.first_row(tile), panel, end, opened);
            });
        });
    }
#endif
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        with_rows(tasks.rows(tile), [&](auto rows) { tiles<decltype(rows)::value>(p, tasks.first_row(tile), panel, end); });
    });
}

// One row of a tile of `rows`, as [k / 8][rows][8] and [groups][rows]; returns its scale.
LLM_INLINE float quantize_row(const float* x, int64_t k, const Product& p, int64_t rows, int8_t* out, int32_t* start) {
    const float scale = row_scale(x, k);
    const Quantizer quantize(scale);
    for (int64_t group = 0, s = 0; group < p.groups; ++group) {
        const int64_t end = Tasks::least(p.steps(), (group + 1) * p.group_steps) * STEP;
        I32 sums = set1_i(0);
        for (int64_t i = s * STEP; i < end; i += LANES) {
            alignas(16) int8_t q[LANES];
            const I32 values = quantize(load_part(x + i, Tasks::least(k, end) - i));
            sums = sums + values;
            store_int8(q, values);
            for (int64_t j = 0; j < Tasks::least(LANES, end - i); j += STEP, ++s) std::memcpy(out + s * rows * STEP, q + j, STEP);
        }
        start[group * rows] = -8 * sum(sums);
    }
    return scale;
}

LLM_INLINE uint8_t both_nibbles(const int8_t* row, int64_t at, int64_t k) {
    const int low = at < k ? row[at] + 8 : 8, high = at + 4 < k ? row[at + 4] + 8 : 8;
    return static_cast<uint8_t>(high << 4 | low);
}

#if LLM_TILES

constexpr int64_t TILE_K = 64;         // k of a step of tiles
constexpr int64_t GROUPED_STEPS = 16;  // in groups, so many steps of an opened panel stay in the first-level cache

// Whether matrix tiles are faster; the sums are the same.
bool uses_tiles(int64_t m, int64_t groups, int64_t group_size) {
    if (groups <= 1 || group_size % TILE_K == 0) return m >= 17;
    return group_size % (TILE_K / 2) == 0 && m >= 25;
}

// Panels that are opened, a block of steps at a time, into int8: a line of nibbles becomes two lines of a tile.
struct NibblePanels {
    const uint8_t* data;
    int64_t lines;  // of nibbles, in a panel
    static constexpr bool IN_PLACE = false;

    int64_t steps() const { return ceil_div(2 * lines, TILE_LINES); }
    int64_t scratch_bytes(int64_t block) const { return TILE_PANELS * block * TILE_BYTES; }
    TileSteps open(int64_t panel, int64_t wide, int64_t first, int64_t count, char* scratch) const {
        const int64_t begin = first * TILE_LINES / 2, end = Tasks::least(lines, (first + count) * TILE_LINES / 2);
        const __m512i mask = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
        for (int64_t c = 0; c < wide; ++c) {
            char* to = scratch + c * count * TILE_BYTES;
            const uint8_t* from = data + ((panel + c) * lines + begin) * PANEL_STEP;
            for (int64_t line = begin; line < end; ++line, from += PANEL_STEP, to += 2 * LINE) {
                const __m512i both = _mm512_loadu_si512(from);
                _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, mask), eight));
                _mm512_store_si512(to + LINE, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), eight));
            }
            std::memset(to, 0, scratch + (c + 1) * count * TILE_BYTES - to);
        }
        return {scratch, count * TILE_BYTES, count, nullptr};
    }
    StoredSteps stored(int64_t panel, int64_t first, int64_t count) const {
        const int64_t begin = first * TILE_LINES / 2, end = Tasks::least(lines, (first + count) * TILE_LINES / 2);
        return {reinterpret_cast<const char*>(data) + (panel * lines + begin) * PANEL_STEP, lines * PANEL_STEP, end - begin};
    }
};

// One group: the sums are exact to the end of k.
void multiply_channels(const Product& p, const TileOperands& a, int64_t from, int64_t threads) {
    const NibblePanels panels{p.weight, p.steps()};
    multiply_tiles<INT8>(a, panels, ceil_div(p.n, LANES), threads, [&](int64_t tile, int64_t panel, int64_t wide, char* sums) {
        const int64_t stride = TILE_PANELS * LANES;
        for (int64_t c = 0; c < wide; ++c) {
            const F32 scale = p.group_scale(0, (panel + c) * LANES);
            float* at = reinterpret_cast<float*>(sums) + c * LANES;
            for (int64_t r = 0; r < a.tile_rows(tile); ++r) {
                const I32 exact = load_i(reinterpret_cast<const int32_t*>(at + r * stride));
                store(at + r * stride, fma(to_float(exact), scale, zero()));
            }
            finish(p, from + tile * TILE_LINES, a.tile_rows(tile), panel + c, at, stride);
        }
    });
}

// Groups: one row tile and one panel at a time, so that the groups' sums so far, [16][16], stay in registers. A group's exact
// sums leave the tiles at once. An instruction takes `depth` of k, 64 or, for groups of an odd multiple of 32, half a line.
class GroupTiles {
    const Product& p;
    const TileOperands& a;
    const int64_t depth;

    static int64_t depth_of(const Product& p) { return p.group_size() % TILE_K ? TILE_K / 2 : TILE_K; }

    // Adds the groups of the block of steps from `first` on to `total`, a part of `meanwhile` fetched at each.
    void add(TileShapes& shapes, int64_t tile, int64_t first, int64_t panel, const char* opened, float* total,
             const Meanwhile& meanwhile) const {
        alignas(64) int32_t sums[TILE_LINES * LANES] = {};
        F32 so_far[TILE_LINES];
        LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r) so_far[r] = first ? load(total + r * LANES) : zero();
        shapes.set(a.tile_rows(tile), depth);
        const char* operands = a.at(tile, first);
        const int64_t operand = a.tile_rows(tile) * LINE, of_group = p.group_size() / depth;
        const int64_t end = Tasks::least(a.block_steps(first) * TILE_K, p.padded_k - first * TILE_K + depth - 1) / depth;
        int64_t group = first * TILE_K / p.group_size();
        for (int64_t dot = 0, turn = 0; dot < end; ++group, ++turn) {
            meanwhile.fetch(turn, 0);
            LLM_TILE_ZERO(0);
            for (const int64_t last = Tasks::least(end, dot + of_group); dot < last; ++dot) {
                const char *at = operands + dot * depth / TILE_K * operand + dot * depth % TILE_K, *b = opened + dot * depth * LANES;
                touch(at, a.tile_rows(tile), depth), touch(b, depth / 4);
                LLM_TILE_LOAD(4, at, LINE);
                LLM_TILE_LOAD(7, b, LINE);
                LLM_TILE_DOT_INT8(0, 4, 7);
            }
            LLM_TILE_STORE(0, sums, LINE);
            const F32 scale = p.group_scale(group, panel * LANES);
            LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r) so_far[r] = fma(to_float(load_i(sums + r * LANES)), scale, so_far[r]);
        }
        LLM_UNROLL for (int r = 0; r < TILE_LINES; ++r) store(total + r * LANES, so_far[r]);
    }

  public:
    GroupTiles(const Product& product, const TileOperands& operands) : p(product), a(operands), depth(depth_of(product)) {}

    // Steps of k in a block, which holds whole groups.
    static int64_t block_steps(const Product& p) {
        const int64_t unit = p.group_size() / depth_of(p);
        return unit < GROUPED_STEPS ? GROUPED_STEPS / unit * unit : unit;
    }

    void multiply(int64_t from, int64_t threads) const {
        const NibblePanels weights{p.weight, p.steps()};
        const int64_t panels = ceil_div(p.n, LANES), tiles = a.tiles(), tile_floats = TILE_LINES * LANES;
        const int64_t share = ceil_div(panels, threads * ceil_div(panels, threads * MOST_GROUPS * TILE_PANELS));
        const int64_t kept_panels = a.steps > a.block ? share : 1, kept = kept_panels * tiles * tile_floats * sizeof(float);
        parallel_for(ceil_div(panels, share), threads, kept + a.block * TILE_BYTES, [&](int64_t task, char* scratch) {
            TileShapes shapes;
            float* totals = reinterpret_cast<float*>(scratch);
            const int64_t begin = task * share, end = Tasks::least(panels, begin + share);
            for (int64_t first = 0; first < a.steps; first += a.block)
                for (int64_t panel = begin; panel < end; ++panel) {
                    const TileSteps opened = weights.open(panel, 1, first, a.block_steps(first), scratch + kept);
                    // Every row tile fetches its part of what this thread opens next.
                    const bool is_last = panel + 1 == end;
                    const int64_t then = is_last ? first + a.block : first;
                    const StoredSteps after = then < a.steps ? weights.stored(is_last ? begin : panel + 1, then, a.block_steps(then))
                                                             : StoredSteps{nullptr, 0, 0};
                    const int64_t part = ceil_div(after.lines, tiles);
                    const int64_t turns = ceil_div(a.block_steps(first) * TILE_K, p.group_size());
                    for (int64_t tile = 0; tile < tiles; ++tile) {
                        float* total = totals + ((panel - begin) % kept_panels * tiles + tile) * tile_floats;
                        const Meanwhile meanwhile{after.data + tile * part * LINE, 0, ceil_div(part, turns), turns, 0, false};
                        add(shapes, tile, first, panel, opened.data, total, meanwhile);
                        if (first + a.block >= a.steps) finish(p, from + tile * TILE_LINES, a.tile_rows(tile), panel, total, LANES);
                    }
                }
        });
    }
};

void tile_linear_w4a8(const Product& p, const float* x, int64_t k, float* row_scales, int64_t threads) {
    const int64_t block = p.groups > 1 ? GroupTiles::block_steps(p) : SHORT_STEPS;
    const int64_t most_tiles = p.groups > 1 ? LEAST_TILES : MOST_TILES;  // of one panel at a time, few rows have their line
    for_row_blocks(p.m, ceil_div(k, TILE_K), 1, block, most_tiles, [&](const TileOperands& a, int64_t from) {
        quantize_operands(a, x + from * k, k, 0.0f, 0, row_scales + from, threads);
        if (p.groups > 1) GroupTiles(p, a).multiply(from, threads);
        else multiply_channels(p, a, from, threads);
    });
}

#endif

void linear_w4a8(const float* x, const uint8_t* weight, const void* scale, int64_t scale_kind, int64_t scale_stride,
                 int64_t group_size, int64_t groups, const float* bias, float* y, int64_t m, int64_t n, int64_t k, int64_t threads) {
    const int64_t padded = ceil_div(k, STEP) * STEP, group_steps = groups == 1 ? padded / STEP : group_size / STEP;
    const Scratch scales(m * sizeof(float));
    float* row_scales = scales.as<float>();
#if LLM_TILES
    if (groups > 0 && uses_tiles(m, groups, group_size)) {
        const Product p{nullptr, nullptr, row_scales, weight, scale, scale_kind, scale_stride, bias, y, m, n, padded, groups, group_steps};
        return tile_linear_w4a8(p, x, k, row_scales, threads);
    }
#endif
    const Scratch operands(m * padded), starts(m * groups * sizeof(int32_t));
    int8_t* a = operands.as<int8_t>();
    int32_t* start = starts.as<int32_t>();
    const Product p{a, start, row_scales, weight, scale, scale_kind, scale_stride, bias, y, m, n, padded, groups, group_steps};
    const Tasks tasks(m, n, MAX_ROWS, padded, BLOCK_BYTES, threads);
    const int64_t workers = m * k < SERIAL_ELEMENTS ? 1 : threads;
    parallel_for(tasks.tiles(), workers, 0, [&](int64_t tile, char*) {
        const int64_t first = tasks.first_row(tile), rows = tasks.rows(tile);
        for (int64_t r = 0; r < rows; ++r)
            row_scales[first + r] = quantize_row(x + (first + r) * k, k, p, rows, a + first * padded + r * STEP,
                                                 start + first * groups + r);
    });
    run_tiles(p, tasks);
}

}  // namespace
}  // namespace llm

using namespace llm;

// scale: [groups][scale_stride] of float32 (0), bfloat16 (1) or float16 (2). group_size is a multiple of 8, or groups is 1.
LLM_EXPORT void llm_linear_w4a8(const float* x, const uint8_t* weight, const void* scale, int64_t scale_kind,
                                int64_t scale_stride, int64_t group_size, int64_t groups, const float* bias, float* y, int64_t m,
                                int64_t n, int64_t k, int64_t threads) {
    linear_w4a8(x, weight, scale, scale_kind, scale_stride, group_size, groups, bias, y, m, n, k, threads);
}

// src int8 [n, k] with values in [-8, 7] -> panels [ceil(n / 16)][ceil(k / 8)][16][4]
LLM_EXPORT void llm_pack_int4(const int8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads) {
    const int64_t steps = ceil_div(k, STEP);
    parallel_for(ceil_div(n, LANES), threads, 0, [&](int64_t panel, char*) {
        uint8_t* out = dst + panel * steps * PANEL_STEP;
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const int64_t row = panel * LANES + lane;
            for (int64_t s = 0; s < steps; ++s)
                for (int64_t j = 0; j < 4; ++j)
                    out[s * PANEL_STEP + lane * 4 + j] = both_nibbles(src + row * k, s * STEP + j, row < n ? k : 0);
        }
    });
}

// Rows [first, end) of the weight.
LLM_EXPORT void llm_unpack_int4(const uint8_t* src, int8_t* dst, int64_t first, int64_t end, int64_t k, int64_t threads) {
    const int64_t bytes = ceil_div(k, STEP) * PANEL_STEP;
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const int64_t row = first + index;
        const uint8_t* panel = src + row / LANES * bytes + row % LANES * 4;
        for (int64_t i = 0; i < k; ++i) {
            const int both = panel[i / STEP * PANEL_STEP + i % 4];
            dst[index * k + i] = static_cast<int8_t>((i % STEP < 4 ? both & 15 : both >> 4) - 8);
        }
    });
}

LLM_KERNEL(llm_linear_w4a8)
LLM_KERNEL(llm_pack_int4)
LLM_KERNEL(llm_unpack_int4)
