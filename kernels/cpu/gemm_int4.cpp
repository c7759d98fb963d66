// GEMM y = x W^T (+ bias): int4 weights, activations quantized here to int8.
//
// Activations have a scale for each group of k, as weights have. int32 sums are exact in each group; groups are added
// in order in float32 (int4.h, which describes the panels too). Sums start at -8 times the sum of the activations,
// which takes the nibbles' 8 back.
#include "bytes.h"
#include "int4.h"
#include "quantize.h"

namespace llm {
namespace {

constexpr int64_t PREFETCH_BYTES = 2048;
constexpr int64_t BLOCK_BYTES = 512 << 10;

// `sums` below: [rows][PANELS][16] floats, the groups added so far. In memory: registers hold one group's sums only.

// With at least this many row tiles panels are unpacked once, to [k / 4][16][4] unsigned bytes.
constexpr int64_t OPENED_FROM = 8;
constexpr int64_t OPENED_STEP = 2 * PANEL_STEP;

// nibbles(p, high): the low or the high nibbles of a vector, as unsigned bytes.
#if LLM_AVX512
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    const Bytes both = load_bytes(p);
    return _mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}
#elif LLM_NEON
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    const uint8x16_t both = vld1q_u8(p);
    return vreinterpretq_s8_u8(high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15)));
}
#elif LLM_AVX2
alignas(32) constexpr uint8_t LOW_NIBBLES[32] = {15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
                                                 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15};
// The mask stays in memory: 12 sums, 2 vectors of weights, a broadcast and a product take all 16 registers.
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    Bytes out = load_256(p);
    if (high) out = _mm256_srli_epi16(out, 4);
    asm volatile("vpand %1, %0, %0" : "+v"(out) : "m"(LOW_NIBBLES));
    return out;
}
#endif

// Adds the exact sums of COUNT groups from `group` on, [COUNT][ROWS][PANELS][16], to `sums`. Not inlined: with its
// branches over the scales' types, the caller's loop would spill, and gcc would keep a copy of all sums on its stack.
template <int ROWS, int PANELS, int COUNT = 1>
__attribute__((noinline)) void add_scaled(const Int4Product& p, int64_t group, int64_t panel, const GroupInputs& inputs,
                                          const int32_t* exact, float* sums) {
    constexpr int64_t width = PANELS * LANES;
    const GroupInputs at = inputs.from(group * ROWS);
    LLM_UNROLL for (int c = 0; c < PANELS; ++c)
        p.add_groups<COUNT>(group, (panel + c) * LANES, at, ROWS, ROWS, exact + c * LANES, ROWS * width,
                            sums + c * LANES, width);
}

#if LLM_DOTS

// `opened`: the unpacked panels, with OPENED.
template <int ROWS, int PANELS, bool OPENED = false>
__attribute__((noinline)) void add_groups(const Int4Product& p, const int8_t* a, const GroupInputs& inputs,
                                          int64_t panel, float* sums, const uint8_t* opened = nullptr) {
    constexpr int vectors = PANELS * PANEL_VECTORS;
    const int64_t bytes = p.panel_bytes();
    const Ahead ahead(PREFETCH_BYTES, PANEL_STEP, p.steps(), PANELS, bytes);
    const uint8_t* b = p.panel(panel);
    // The float sums are read and written once for so many groups.
    constexpr int at_once = 4;
    alignas(64) int32_t exact[at_once][ROWS * PANELS * LANES];
    int64_t s = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
        Bytes acc[ROWS][vectors];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c)
            acc[r][c] = broadcast_bytes(inputs.start + group * ROWS + r);
        const int64_t end = min(p.steps(), (group + 1) * p.group_steps);
        for (; s < end; ++s) {
            const int64_t distance = ahead.distance(s);
            const uint8_t* at = b + s * PANEL_STEP;
            if (!OPENED) LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(at + c * bytes + distance);
            LLM_UNROLL for (int half = 0; half < 2; ++half) {
                Bytes w[vectors];
                LLM_UNROLL for (int c = 0; c < vectors; ++c)
                    w[c] = OPENED ? load_bytes(opened + (c / PANEL_VECTORS * p.steps() + s) * OPENED_STEP +
                                               half * PANEL_STEP + c % PANEL_VECTORS * sizeof(Bytes))
                                  : nibbles(at + c / PANEL_VECTORS * bytes + c % PANEL_VECTORS * sizeof(Bytes), half);
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                    const Bytes value = broadcast_bytes(a + (s * ROWS + r) * STEP + half * 4);
                    LLM_UNROLL for (int c = 0; c < vectors; ++c) dot(acc[r][c], w[c], value);
                }
            }
        }
        const int64_t place = group % at_once;
        std::memcpy(exact[place], acc, sizeof acc);
        if (place == at_once - 1) add_scaled<ROWS, PANELS, at_once>(p, group - place, panel, inputs, exact[0], sums);
        else if (group + 1 == p.groups)
            for (int64_t g = 0; g <= place; ++g)
                add_scaled<ROWS, PANELS>(p, group - place + g, panel, inputs, exact[g], sums);
    }
}

#elif defined(LLM_PLAIN)

constexpr int panels_for(int) { return 1; }

template <int ROWS, int PANELS, bool OPENED>
void add_groups(const Int4Product& p, const int8_t* a, const GroupInputs& inputs, int64_t panel, float* sums) {
    const uint8_t* b = p.panel(panel);
    int64_t s = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
        int32_t acc[ROWS][LANES];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < LANES; ++c) acc[r][c] = inputs.start[group * ROWS + r];
        for (const int64_t end = min(p.steps(), (group + 1) * p.group_steps); s < end; ++s)
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < LANES; ++c)
                    for (int j = 0; j < 4; ++j) {
                        const int both = b[s * PANEL_STEP + c * 4 + j];
                        const int8_t* at = a + (s * ROWS + r) * STEP + j;
                        acc[r][c] += (both & 15) * at[0] + (both >> 4) * at[4];
                    }
        add_scaled<ROWS, PANELS>(p, group, panel, inputs, acc[0], sums);
    }
}

#else

// Unsigned times signed bytes in pairs, summed in int16 over 32 k: at most 16 * 15 * 128 = 30720 in magnitude.
#if LLM_AVX512
LLM_INLINE I32 pairs(const Bytes* x) { return {_mm512_madd_epi16(x[0], _mm512_set1_epi16(1))}; }
#else
LLM_INLINE I32 pairs(const Bytes* x) {
    const Bytes one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(x[0], one), _mm256_madd_epi16(x[1], one)};
}
#endif
LLM_INLINE void multiply(Bytes& sum, Bytes w, Bytes a) {
    asm volatile("vpmaddubsw %2, %1, %0" : "=v"(sum) : "v"(w), "v"(a));
}
LLM_INLINE void multiply_add(Bytes& sum, Bytes w, Bytes a) {
    Bytes product;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(w), "v"(a));
}

// Few rows are bound by memory: they alternate between panels, so that several streams of memory are under way.
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

// `opened`: the unpacked panels, with OPENED.
template <int ROWS, int PANELS, bool OPENED = false>
__attribute__((noinline)) void add_groups(const Int4Product& p, const int8_t* a, const GroupInputs& inputs,
                                          int64_t panel, float* sums, const uint8_t* opened = nullptr) {
    const int64_t bytes = p.panel_bytes();
    const Ahead ahead(PREFETCH_BYTES, PANEL_STEP, p.steps(), PANELS, bytes);
    alignas(64) int32_t group_sums[ROWS * PANELS * LANES];
    int64_t s = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
        const int64_t end = min(p.steps(), (group + 1) * p.group_steps);
        for (bool first = true; first || s < end; first = false) {
            const int64_t some = end - s < STEPS_IN_WORDS ? 1 : STEPS_IN_WORDS, distance = ahead.distance(s);
            const int8_t* at = a + s * ROWS * STEP;
            for (int c = 0; c < PANELS; ++c) {
                const uint8_t* b = OPENED ? opened + (c * p.steps() + s) * OPENED_STEP
                                          : p.panel(panel + c) + s * PANEL_STEP;
                Bytes words[ROWS][PANEL_VECTORS];
                if (some == STEPS_IN_WORDS) few_steps<ROWS, STEPS_IN_WORDS, OPENED>(at, b, distance, words);
                else few_steps<ROWS, 1, OPENED>(at, b, distance, words);
                I32 sum[ROWS];
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                    const I32 before = first ? set1_i(inputs.start[group * ROWS + r])
                                             : load_i(group_sums + (r * PANELS + c) * LANES);
                    sum[r] = before + pairs(words[r]);
                }
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) store_i(group_sums + (r * PANELS + c) * LANES, sum[r]);
            }
            s += some;
        }
        add_scaled<ROWS, PANELS>(p, group, panel, inputs, group_sums, sums);
    }
}

#endif

template <int ROWS, int PANELS, class... Opened>
void tile(const Int4Product& p, int64_t row, int64_t panel, Opened... opened) {
    alignas(64) float sums[ROWS * PANELS * LANES] = {};
    add_groups<ROWS, PANELS, sizeof...(opened)>(p, p.a + row * p.padded_k(), p.inputs.from(row * p.groups), panel, sums,
                                                opened...);
    for (int c = 0; c < PANELS; ++c) p.finish(row, ROWS, panel + c, sums + c * LANES, PANELS * LANES);
}

template <int ROWS> void tiles(const Int4Product& p, int64_t row, int64_t panel, int64_t end) {
    for_panels<panels_for(ROWS)>(panel, end,
                                 [&](auto wide, int64_t at) { tile<ROWS, decltype(wide)::value>(p, row, at); });
}

#if LLM_AVX2 || LLM_VNNI
void open_panel(const uint8_t* panel, int64_t steps, uint8_t* opened) {
    for (int64_t s = 0; s < steps; ++s) {
        prefetch(panel + s * PANEL_STEP + PREFETCH_BYTES);
        LLM_UNROLL for (int i = 0; i < 2 * PANEL_VECTORS; ++i) {
            const Bytes w = nibbles(panel + s * PANEL_STEP + i % PANEL_VECTORS * sizeof(Bytes), i >= PANEL_VECTORS);
            std::memcpy(opened + s * OPENED_STEP + i * sizeof(Bytes), &w, sizeof w);
        }
    }
}

template <int ROWS>
void opened_tiles(const Int4Product& p, int64_t row, int64_t panel, int64_t end, const uint8_t* opened) {
    for_panels<panels_for(ROWS)>(panel, end, [&](auto wide, int64_t at) {
        tile<ROWS, decltype(wide)::value>(p, row, at, opened + (at - panel) * p.steps() * OPENED_STEP);
    });
}
#endif

void run_tiles(const Int4Product& p, const Tasks& tasks) {
#if LLM_AVX2 || LLM_VNNI
    if (tasks.block_tiles() >= OPENED_FROM) {
        const int64_t size = p.steps() * OPENED_STEP;
        const auto open = [&](int64_t panel, int64_t end, char* scratch) {
            for (uint8_t* to = reinterpret_cast<uint8_t*>(scratch); panel < end; ++panel, to += size)
                open_panel(p.panel(panel), p.steps(), to);
        };
        return tasks.run(tasks.group_panels() * size, open,
                         [&](int64_t tile, int64_t panel, int64_t end, const char* scratch) {
            const uint8_t* opened = reinterpret_cast<const uint8_t*>(scratch);
            with_rows(tasks.rows(tile), [&](auto rows) {
                opened_tiles<decltype(rows)::value>(p, tasks.first_row(tile), panel, end, opened);
            });
        });
    }
#endif
    tasks.run([&](int64_t tile, int64_t panel, int64_t end) {
        with_rows(tasks.rows(tile),
                  [&](auto rows) { tiles<decltype(rows)::value>(p, tasks.first_row(tile), panel, end); });
    });
}

// Quantizes ROWS batch rows of a tile of `rows`, from `place` of its [rows] on, to [k / 8][rows][8], group by group.
template <int ROWS>
LLM_INLINE void quantize_rows(const Int4Product& p, int64_t row, int64_t rows, int8_t* out, const InputMemory& kept,
                              int64_t place) {
    const float* x = p.x + row * p.k;
    for (int64_t group = 0; group < p.groups; ++group) {
        const int64_t first = group * p.group_steps * STEP, end = min(p.k, first + p.group_steps * STEP);
        RowQuantizer by[ROWS];
        I32 sums[ROWS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            by[r] = RowQuantizer(x + r * p.k + first, end - first, 0.0f, 0);
            sums[r] = set1_i(0);
        }
        const auto put = [&](int64_t i, int64_t steps, const auto& load_from) {
            I32 q[ROWS];
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                q[r] = by[r].quantize(load_from(x + r * p.k + i));
                sums[r] = sums[r] + q[r];
            }
            store_steps<STEP>(q, steps, rows, out + i * rows);
        };
        int64_t i = first;
        for (; i + LANES <= end; i += LANES) put(i, LANES / STEP, [](const float* at) { return load(at); });
        if (i < end) put(i, ceil_div(end - i, STEP), [&](const float* at) { return load_part(at, end - i); });
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) kept.keep(place + group * rows + r, by[r].factor, sum(sums[r]));
    }
}

// Eight values of consecutive k as four bytes of a panel; missing values are 0.
LLM_INLINE uint32_t both_nibbles(const int8_t* values, int64_t count) {
    uint64_t eight = 0;
    std::memcpy(&eight, values, count < STEP ? count : STEP);
    const uint64_t codes = (eight & 0x0f0f0f0f0f0f0f0f) ^ 0x0808080808080808;  // plus 8
    return static_cast<uint32_t>(codes) | static_cast<uint32_t>(codes >> 32) << 4;
}

}  // namespace

void linear_int4(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
#if LLM_TILES
    if (linear_int4_by_tiles(weight, x, y, m, threads)) return;
#endif
    Int4Product p({weight, x, y, m});
    const int64_t padded = p.padded_k(), groups = p.groups;
    const Scratch operands(m * padded);
    const InputMemory inputs(m, groups);
    int8_t* a = operands.as<int8_t>();
    p.a = a, p.inputs = inputs.inputs();
    const Tasks tasks(m, p.n, MAX_ROWS, padded, BLOCK_BYTES, threads);
    const int64_t quantizing = m * p.k < SERIAL_ELEMENTS ? 1 : threads;
    tasks.for_rows<ROWS_AT_ONCE<int8_t>>(quantizing, 0, [&](auto count, int64_t tile, int64_t r, char*) {
        const int64_t first = tasks.first_row(tile);
        quantize_rows<decltype(count)::value>(p, first + r, tasks.rows(tile), a + first * padded + r * STEP, inputs,
                                              first * groups + r);
    });
    run_tiles(p, tasks);
}

// Values must lie in [-8, 7].
void pack_int4(const int8_t* src, uint8_t* dst, int64_t n, int64_t k, int64_t threads) {
    constexpr int64_t block = 8;  // steps: a cache line of each row at once
    const int64_t steps = ceil_div(k, STEP);
    parallel_for(ceil_div(n, LANES), threads, 0, [&](int64_t panel, char*) {
        uint8_t* out = dst + panel * steps * PANEL_STEP;
        for (int64_t from = 0; from < steps; from += block)
            for (int64_t lane = 0; lane < LANES; ++lane)
                for (int64_t s = from; s < min(from + block, steps); ++s) {
                    const int64_t row = panel * LANES + lane, left = row < n ? k - s * STEP : 0;
                    const uint32_t four = both_nibbles(src + row * k + s * STEP, left);
                    std::memcpy(out + s * PANEL_STEP + lane * 4, &four, 4);
                }
    });
}

void unpack_int4(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads) {
    const int64_t k = weight.k, bytes = ceil_div(k, STEP) * PANEL_STEP;
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const int64_t row = first + index;
        const uint8_t* panel = static_cast<const uint8_t*>(weight.data) + row / LANES * bytes + row % LANES * 4;
        for (int64_t i = 0; i < k; ++i) {
            const int both = panel[i / STEP * PANEL_STEP + i % 4];
            dst[index * k + i] = static_cast<int8_t>((i % STEP < 4 ? both & 15 : both >> 4) - 8);
        }
    });
}

}  // namespace llm
