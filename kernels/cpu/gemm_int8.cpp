// GEMM y = x W^T (+ bias): int8 weights, activations quantized here to int8; exact int32 sums, one scale per output
// channel. Weights of int4 with two levels of scales are int8 as soon as they are unpacked.
//
// A panel is [k / 4][16][4]: four k of an output channel side by side, as VNNI instructions read them. k is padded to a
// multiple of 4 with zeros. Without VNNI or NEON both operands are widened to int16 and multiplied in pairs. Sums stay
// below 2^31 for k up to 2^17: the caller checks.
#include "bytes.h"
#include "gemm_tiles.h"
#include "quantize.h"
#include "rotate.h"
#include "weight.h"

namespace llm {
namespace {

// Unpacks int4 with two levels of scales to int8: v = (w + 8) * step - shift, whole numbers of 8 bits.
//
// Beside the panel (int4.h) each group has [16] bytes: an output channel's step in the low nibble, its place in the
// high one; shift = step * (place + 16) * 5 / 16, rounded down. The product of two nibbles is a byte, so a product of
// 16 bits holds those of two codes of a channel. Differences are modulo 256, and exact, as v has 8 bits. An int4 step,
// 8 k, becomes two steps of an int8 panel, [2][16][4].

// Panels of int4 with levels, `groups` groups of `group_steps` times 8 k each.
struct LevelPanels {
    const uint8_t *data, *levels;
    int64_t groups, group_steps;

    static constexpr int64_t CODES = LANES * 4, OPENED = 2 * CODES;  // bytes of 8 k

    explicit LevelPanels(const Weight& weight)
        : data(static_cast<const uint8_t*>(weight.data)), levels(weight.levels), groups(weight.k / weight.group_size),
          group_steps(weight.group_size / 8) {}

    int64_t steps() const { return groups * group_steps; }
    int64_t bytes() const { return steps() * CODES; }
    const uint8_t* codes(int64_t panel) const { return data + panel * bytes(); }
    const uint8_t* levels_of(int64_t panel) const { return levels + panel * groups * LANES; }
};

#if defined(LLM_PLAIN)

struct Levels {
    const uint8_t* both;
    explicit Levels(const uint8_t* levels) : both(levels) {}
    void open(const uint8_t* codes, int8_t* out) const {
        for (int64_t i = 0; i < LevelPanels::CODES; ++i) {
            const int step = both[i / 4] & 15, shift = step * ((both[i / 4] >> 4) + 16) * 5 / 16;
            out[i] = static_cast<int8_t>((codes[i] & 15) * step - shift);
            out[LevelPanels::CODES + i] = static_cast<int8_t>((codes[i] >> 4) * step - shift);
        }
    }
};

#else

#if LLM_AVX512
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    const __m512i both = _mm512_loadu_si512(p);
    return _mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}
// Steps and shifts of vector `i` of a panel's channels, of 32 bits each.
struct WideLevels {
    Bytes steps, shifts;
    LLM_INLINE WideLevels(const uint8_t* levels, int) {
        const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(levels)));
        const __m512i places = _mm512_or_si512(_mm512_srli_epi32(both, 4), _mm512_set1_epi32(16));
        steps = _mm512_and_si512(both, _mm512_set1_epi32(15));
        shifts = _mm512_mulhi_epu16(_mm512_mullo_epi16(steps, places), _mm512_set1_epi32(5 << 12));
    }
};
#elif LLM_AVX2
LLM_INLINE Bytes nibbles(const uint8_t* p, bool high) {
    const __m256i both = load_256(p);
    return _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}
struct WideLevels {
    Bytes steps, shifts;
    LLM_INLINE WideLevels(const uint8_t* levels, int i) {
        const __m256i both = _mm256_cvtepu8_epi32(
            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(levels + i * sizeof(Bytes) / 4)));
        const __m256i places = _mm256_or_si256(_mm256_srli_epi32(both, 4), _mm256_set1_epi32(16));
        steps = _mm256_and_si256(both, _mm256_set1_epi32(15));
        shifts = _mm256_mulhi_epu16(_mm256_mullo_epi16(steps, places), _mm256_set1_epi32(5 << 12));
    }
};
#endif

// What the codes of a group of a panel are multiplied by, and what is then taken away.
struct Levels {
    Bytes step[PANEL_VECTORS], shift[PANEL_VECTORS];

    Levels() = default;
#if LLM_NEON
    explicit LLM_INLINE Levels(const uint8_t* levels) {
        const uint8x16_t both = vld1q_u8(levels), steps = vandq_u8(both, vdupq_n_u8(15));
        const uint8x16_t places = vorrq_u8(vshrq_n_u8(both, 4), vdupq_n_u8(16));
        const uint16x8_t low = vmulq_n_u16(vmull_u8(vget_low_u8(steps), vget_low_u8(places)), 5);
        const uint16x8_t high = vmulq_n_u16(vmull_u8(vget_high_u8(steps), vget_high_u8(places)), 5);
        const uint8x16_t shifts = vcombine_u8(vshrn_n_u16(low, 4), vshrn_n_u16(high, 4));
        const uint8x16_t four = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
        LLM_UNROLL for (int i = 0; i < PANEL_VECTORS; ++i) {
            const uint8x16_t place = vaddq_u8(four, vdupq_n_u8(static_cast<uint8_t>(4 * i)));
            step[i] = vreinterpretq_s8_u8(vqtbl1q_u8(steps, place));
            shift[i] = vreinterpretq_s8_u8(vqtbl1q_u8(shifts, place));
        }
    }
    LLM_INLINE Bytes value(int i, const uint8_t* codes, bool high) const {
        const uint8x16_t both = vld1q_u8(codes + i * sizeof(Bytes));
        const uint8x16_t code = high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
        return vsubq_s8(vmulq_s8(vreinterpretq_s8_u8(code), step[i]), shift[i]);
    }
#elif LLM_AVX512
    explicit LLM_INLINE Levels(const uint8_t* levels) {
        const WideLevels of(levels, 0);
        step[0] = _mm512_or_si512(of.steps, _mm512_slli_epi32(of.steps, 16));
        shift[0] = _mm512_shuffle_epi8(of.shifts, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    }
    LLM_INLINE Bytes value(int i, const uint8_t* codes, bool high) const {
        return _mm512_sub_epi8(_mm512_mullo_epi16(nibbles(codes, high), step[i]), shift[i]);
    }
#else
    explicit LLM_INLINE Levels(const uint8_t* levels) {
        LLM_UNROLL for (int i = 0; i < PANEL_VECTORS; ++i) {
            const WideLevels of(levels, i);
            const __m256i four = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808,
                                                   0x0c0c0c0c);
            step[i] = _mm256_or_si256(of.steps, _mm256_slli_epi32(of.steps, 16));
            shift[i] = _mm256_shuffle_epi8(of.shifts, four);
        }
    }
    LLM_INLINE Bytes value(int i, const uint8_t* codes, bool high) const {
        return _mm256_sub_epi8(_mm256_mullo_epi16(nibbles(codes + i * sizeof(Bytes), high), step[i]), shift[i]);
    }
#endif
    // 8 k: 64 bytes of codes -> 128 of values.
    LLM_INLINE void open(const uint8_t* codes, int8_t* out) const {
        LLM_UNROLL for (int half = 0; half < 2; ++half) LLM_UNROLL for (int i = 0; i < PANEL_VECTORS; ++i) {
            const Bytes v = value(i, codes, half);
            std::memcpy(out + half * LevelPanels::CODES + i * sizeof(Bytes), &v, sizeof v);
        }
    }
};

#endif

// 8 k at a time, from step `first` on, of one panel -> an int8 panel.
inline void open_levels(const LevelPanels& panels, int64_t panel, int64_t first, int64_t end, int8_t* out) {
    constexpr int64_t ahead = 2048;
    const uint8_t *codes = panels.codes(panel), *levels = panels.levels_of(panel);
    for (int64_t s = first; s < end;) {
        const int64_t group = s / panels.group_steps, stop = min(end, (group + 1) * panels.group_steps);
        const Levels of(levels + group * LANES);
        for (; s < stop; ++s, out += LevelPanels::OPENED) {
            prefetch(codes + s * LevelPanels::CODES + ahead);
            of.open(codes + s * LevelPanels::CODES, out);
        }
    }
}

constexpr int64_t STEP = 4;                   // k of one group of a column
constexpr int64_t PANEL_STEP = LANES * STEP;  // elements of a panel per step
// Bytes ahead: of panels read side by side, and of one read alone, whose block is longer.
constexpr int64_t prefetch_bytes(int panels) { return panels > 1 ? 2048 : 4096; }
constexpr int64_t BLOCK_BYTES = 512 << 10;

#if LLM_DOTS

#if LLM_NEON
using Operand = int8_t;
constexpr int32_t OPERAND_SHIFT = 0;
#else
// VNNI multiplies unsigned by signed bytes. Activations are stored plus 128; at the end 128 times the output channel's
// sum is subtracted, modulo 2^32 and therefore exactly.
using Operand = uint8_t;
constexpr int32_t OPERAND_SHIFT = 128;
#endif

#if LLM_MMLA
constexpr bool PAIRS = true;

// The dot products of pairs of rows with I8MM; operands and panels are those of all others.
// Two steps of a panel at once: an instruction multiplies 2 rows of 8 k by 2 output channels of 8 k. Sums of a pair of
// rows are [8] vectors of [2 rows][2 channels].
constexpr int PAIRED = LANES / 2;

// Four bytes of a line alternate with those of the next line: 8 k of a row or of a channel side by side.
LLM_INLINE Bytes joined_low(Bytes line, Bytes next) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(line), vreinterpretq_s32_s8(next)));
}
LLM_INLINE Bytes joined_high(Bytes line, Bytes next) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(line), vreinterpretq_s32_s8(next)));
}
// The rows of a pair in two lines of operands.
LLM_INLINE Bytes row_pair(const Operand* line, const Operand* next) {
    return joined_low(vcombine_s8(vld1_s8(line), vdup_n_s8(0)), vcombine_s8(vld1_s8(next), vdup_n_s8(0)));
}
LLM_INLINE void multiply_pairs(int32x4_t& sum, Bytes rows, Bytes channels) { sum = vmmlaq_s32(sum, rows, channels); }

// Sums of an even number of rows and one panel. An odd last step is joined with zeros.
template <int ROWS>
__attribute__((noinline)) void paired_dots(const Operand* a, const int8_t* b, int64_t panel_bytes, int64_t steps,
                                           int32_t* out) {
    int32x4_t acc[ROWS / 2][PAIRED];
    LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) LLM_UNROLL for (int c = 0; c < PAIRED; ++c)
        acc[r][c] = vdupq_n_s32(0);
    const Ahead ahead(prefetch_bytes(1), PANEL_STEP, steps, 1, panel_bytes);
    const auto add = [&](const Operand* line, const Operand* next_line, const int8_t* w, const int8_t* next_w) {
        Bytes rows[ROWS / 2];
        LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) rows[r] = row_pair(line + 2 * r * STEP, next_line + 2 * r * STEP);
        LLM_UNROLL for (int v = 0; v < PANEL_VECTORS; ++v) {
            const Bytes here = load_bytes(w + v * sizeof(Bytes)), next = load_bytes(next_w + v * sizeof(Bytes));
            const Bytes low = joined_low(here, next), high = joined_high(here, next);
            LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) {
                multiply_pairs(acc[r][2 * v], rows[r], low);
                multiply_pairs(acc[r][2 * v + 1], rows[r], high);
            }
        }
    };
    int64_t s = 0;
    for (; s + 2 <= steps; s += 2) {
        prefetch(b + s * PANEL_STEP + ahead.distance(s));
        prefetch(b + (s + 1) * PANEL_STEP + ahead.distance(s));
        add(a + s * ROWS * STEP, a + (s + 1) * ROWS * STEP, b + s * PANEL_STEP, b + (s + 1) * PANEL_STEP);
    }
    alignas(64) static constexpr int8_t zeros[PANEL_STEP] = {};
    if (s < steps) add(a + s * ROWS * STEP, zeros, b + s * PANEL_STEP, zeros);
    LLM_UNROLL for (int r = 0; r < ROWS / 2; ++r) LLM_UNROLL for (int v = 0; v < PANEL_VECTORS; ++v) {
        const int64x2_t low = vreinterpretq_s64_s32(acc[r][2 * v]), high = vreinterpretq_s64_s32(acc[r][2 * v + 1]);
        vst1q_s32(out + 2 * r * LANES + v * 4, vreinterpretq_s32_s64(vzip1q_s64(low, high)));
        vst1q_s32(out + (2 * r + 1) * LANES + v * 4, vreinterpretq_s32_s64(vzip2q_s64(low, high)));
    }
}
#else
constexpr bool PAIRS = false;
#endif

// What a tile of PANELS panels prefetches. One row tile is bound by memory: it fetches its own panels a little ahead.
// Of several only the first would wait for memory: each fetches its share of the panels that its thread takes next.
template <int PANELS> class Prefetcher {
    const Ahead ahead_;
    const int64_t panel_bytes_, bytes_;  // bytes_: of its share, for a step
    const char* share_ = nullptr;

  public:
    // `packed`: the panels lie in the cache, unpacked from there by the first row tile; else null.
    Prefetcher(const int8_t* panels, int64_t panel_bytes, int64_t steps, const TileInBlock& in_block,
               const uint8_t* packed)
        : ahead_(prefetch_bytes(PANELS), PANEL_STEP, steps, PANELS, panel_bytes), panel_bytes_(panel_bytes),
          bytes_(packed ? ceil_div(PANELS * PANEL_STEP / 2, in_block.count - 1)
                        : ceil_div(PANELS * PANEL_STEP, in_block.count)) {
        if (in_block.count == 1) return;
        const auto share = [&](const void* from, int64_t bytes, int64_t index, int64_t count) {
            return static_cast<const char*>(from) + in_block.panels * bytes + index * PANELS * bytes / count;
        };
        share_ = packed ? share(packed, panel_bytes / 2, in_block.index - 1, in_block.count - 1)
                        : share(panels, panel_bytes, in_block.index, in_block.count);
    }
    // `at`: the step in the first panel.
    LLM_INLINE void step(const int8_t* at, int64_t step) const {
        if (share_) return prefetch_far(share_ + step * bytes_);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(at + c * panel_bytes_ + ahead_.distance(step));
    }
};

// Sums [ROWS][PANELS][16]. Not inlined: what the caller keeps in registers would make it spill.
template <int ROWS, int PANELS>
__attribute__((noinline)) void dots(const Operand* a, const int8_t* b, int64_t panel_bytes, int64_t steps,
                                    const TileInBlock& in_block, const uint8_t* packed, int32_t* out) {
    constexpr int vectors = PANELS * PANEL_VECTORS;
    Bytes acc[ROWS][vectors];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c) acc[r][c] = Bytes{};
    const Prefetcher<PANELS> prefetcher(b, panel_bytes, steps, in_block, packed);
    for (int64_t s = 0; s < steps; ++s) {
        Bytes w[vectors];
        prefetcher.step(b + s * PANEL_STEP, s);
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) LLM_UNROLL for (int v = 0; v < PANEL_VECTORS; ++v)
            w[c * PANEL_VECTORS + v] = load_bytes(b + c * panel_bytes + s * PANEL_STEP + v * sizeof(Bytes));
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const Bytes value = broadcast_bytes(a + (s * ROWS + r) * STEP);
            LLM_UNROLL for (int c = 0; c < vectors; ++c) dot(acc[r][c], value, w[c]);
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c)
        std::memcpy(out + r * PANELS * LANES + c * sizeof(Bytes) / 4, &acc[r][c], sizeof(Bytes));
}

// The same, of panels that are unpacked on the way; with KEEPS to `opened` too, for the row tiles that follow.
template <int ROWS, int PANELS, bool KEEPS>
__attribute__((noinline)) void leveled_dots(const Operand* a, const LevelPanels& b, int64_t panel, int8_t* opened,
                                            int32_t* out) {
    constexpr int vectors = PANELS * PANEL_VECTORS;
    constexpr int64_t step_bytes = LevelPanels::CODES;
    const Ahead ahead(prefetch_bytes(PANELS), step_bytes, b.steps(), PANELS, b.bytes());
    Bytes acc[ROWS][vectors];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c) acc[r][c] = Bytes{};
    const uint8_t *codes = b.codes(panel), *levels = b.levels_of(panel);
    const int64_t bytes = b.bytes(), levels_bytes = b.groups * LANES;
    for (int64_t group = 0, s = 0; group < b.groups; ++group, levels += LANES) {
        Levels of[PANELS];
        LLM_UNROLL for (int c = 0; c < PANELS; ++c) of[c] = Levels(levels + c * levels_bytes);
        for (const int64_t end = s + b.group_steps; s < end; ++s, codes += step_bytes) {
            LLM_UNROLL for (int c = 0; c < PANELS; ++c) prefetch(codes + c * bytes + ahead.distance(s));
            LLM_UNROLL for (int half = 0; half < 2; ++half) {
                Bytes w[vectors];
                LLM_UNROLL for (int c = 0; c < vectors; ++c) {
                    w[c] = of[c / PANEL_VECTORS].value(c % PANEL_VECTORS, codes + c / PANEL_VECTORS * bytes, half);
                    if (KEEPS) {
                        int8_t* to = opened + (c / PANEL_VECTORS * b.steps() + s) * LevelPanels::OPENED;
                        std::memcpy(to + half * PANEL_STEP + c % PANEL_VECTORS * sizeof(Bytes), &w[c], sizeof w[c]);
                    }
                }
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                    const Bytes value = broadcast_bytes(a + ((2 * s + half) * ROWS + r) * STEP);
                    LLM_UNROLL for (int c = 0; c < vectors; ++c) dot(acc[r][c], value, w[c]);
                }
            }
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c)
        std::memcpy(out + r * PANELS * LANES + c * sizeof(Bytes) / 4, &acc[r][c], sizeof(Bytes));
}

#if LLM_VNNI

// With so few rows unpacking would take longer than multiplying. So nibbles are multiplied as they are, with signed
// activations, and sums of at most 16 k, which 16 bits hold (16 * 15 * 128 = 30720), by the step. What the shift takes
// away is a product with the sum of the activations.
constexpr int64_t CHUNK = 4;  // int4 steps whose low nibbles are 16 k
#if LLM_AVX512
constexpr int64_t FEW_ROWS = 4;
constexpr int few_panels(int rows) { return rows <= 2 ? 4 : 2; }
#else
constexpr int64_t FEW_ROWS = 2;
constexpr int few_panels(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Chunks of a group, and of a row.
inline int64_t chunks(const LevelPanels& b) { return ceil_div(b.group_steps, CHUNK); }
// Calls run(group, first step, end) for each chunk in order.
template <class Run> LLM_INLINE void for_chunks(const LevelPanels& b, const Run& run) {
    for (int64_t group = 0, s = 0; group < b.groups; ++group)
        for (const int64_t end = s + b.group_steps; s < end; s = min(end, s + CHUNK))
            run(group, s, min(end, s + CHUNK));
}
// The sum of each chunk's activations, [chunks][ROWS], from a [k / 4][ROWS][4].
template <int ROWS> void sum_inputs(const int8_t* a, const LevelPanels& b, int32_t* out) {
    const int32_t ones = 0x01010101;
    const Bytes one = broadcast_bytes(&ones);
    for_chunks(b, [&](int64_t, int64_t first, int64_t end) {
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            Bytes sum{};
            for (int64_t s = 2 * first; s < 2 * end; ++s) dot(sum, one, broadcast_bytes(a + (s * ROWS + r) * STEP));
            std::memcpy(out++, &sum, sizeof *out);
        }
    });
}

template <int ROWS, int PANELS>
__attribute__((noinline)) void few_dots(const int8_t* a, const int32_t* input_sums, const LevelPanels& b, int64_t panel,
                                        int32_t* out) {
    constexpr int vectors = PANELS * PANEL_VECTORS;
    constexpr int64_t step_bytes = LevelPanels::CODES;
    const Ahead ahead(prefetch_bytes(PANELS), step_bytes, b.steps(), PANELS, b.bytes());
    const uint8_t *codes = b.codes(panel), *levels = b.levels_of(panel);
    const int64_t bytes = b.bytes(), levels_bytes = b.groups * LANES;
    Bytes total[ROWS][vectors];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c) total[r][c] = Bytes{};
    for_chunks(b, [&](int64_t group, int64_t first, int64_t end) {
        Bytes low[ROWS][vectors], high[ROWS][vectors];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c)
            low[r][c] = high[r][c] = Bytes{};
        const auto step = [&](int64_t s) {
            LLM_UNROLL for (int c = 0; c < PANELS; ++c)
                prefetch(codes + s * step_bytes + c * bytes + ahead.distance(s));
            LLM_UNROLL for (int half = 0; half < 2; ++half) {
                Bytes w[vectors];
                LLM_UNROLL for (int c = 0; c < vectors; ++c) w[c] = nibbles(
                    codes + s * step_bytes + c / PANEL_VECTORS * bytes + c % PANEL_VECTORS * sizeof(Bytes), half);
                LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                    const Bytes value = broadcast_bytes(a + ((2 * s + half) * ROWS + r) * STEP);
                    LLM_UNROLL for (int c = 0; c < vectors; ++c) dot(half ? high[r][c] : low[r][c], w[c], value);
                }
            }
        };
        if (end - first == CHUNK) LLM_UNROLL for (int64_t s = 0; s < CHUNK; ++s) step(first + s);
        else
            for (int64_t s = first; s < end; ++s) step(s);
        LLM_UNROLL for (int c = 0; c < vectors; ++c) {
            const WideLevels of(levels + group * LANES + c / PANEL_VECTORS * levels_bytes, c % PANEL_VECTORS);
            LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
                dot_words(total[r][c], low[r][c], of.steps);
                dot_words(total[r][c], high[r][c], of.steps);
                dot_words(total[r][c], of.shifts, broadcast_bytes(input_sums + r));
            }
        }
        input_sums += ROWS;
    });
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < vectors; ++c)
        std::memcpy(out + r * PANELS * LANES + c * sizeof(Bytes) / 4, &total[r][c], sizeof(Bytes));
}

#endif

#else

using Operand = int16_t;
constexpr int32_t OPERAND_SHIFT = 0;
constexpr bool PAIRS = false;

#if defined(LLM_PLAIN)

constexpr int panels_for(int) { return 1; }

template <int ROWS, int PANELS>
void dots(const Operand* a, const int8_t* b, int64_t, int64_t steps, const TileInBlock&, const uint8_t*, int32_t* out) {
    static_assert(PANELS == 1, "one panel at a time");
    for (int r = 0; r < ROWS; ++r) {
        int32_t acc[LANES] = {};
        for (int64_t s = 0; s < steps; ++s)
            for (int c = 0; c < LANES; ++c)
                for (int j = 0; j < STEP; ++j)
                    acc[c] += a[(s * ROWS + r) * STEP + j] * b[s * PANEL_STEP + c * STEP + j];
        std::memcpy(out + r * LANES, acc, sizeof acc);
    }
}

#else

// A vector of int16 holds 4 k of some output channels; multiplied in pairs it gives two int32 per channel.
using Vector = Bytes;
constexpr int VECTORS = 2 * PANEL_VECTORS;
#if LLM_AVX512
LLM_INLINE Vector widen_load(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
LLM_INLINE Vector broadcast_four(const int16_t* p) {
    int64_t four;
    std::memcpy(&four, p, 8);
    return _mm512_set1_epi64(four);
}
LLM_INLINE Vector multiply(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
LLM_INLINE Vector nothing() { return _mm512_setzero_si512(); }
#else
LLM_INLINE Vector widen_load(const int8_t* p) { return _mm256_cvtepi8_epi16(load_128(p)); }
LLM_INLINE Vector broadcast_four(const int16_t* p) {
    int64_t four;
    std::memcpy(&four, p, 8);
    return _mm256_set1_epi64x(four);
}
LLM_INLINE Vector multiply(Vector a, Vector b) { return _mm256_madd_epi16(a, b); }
LLM_INLINE Vector nothing() { return _mm256_setzero_si256(); }
#endif
// Assembly: gcc moves additions behind all products, and spills.
LLM_INLINE void add_to(Vector& sum, Vector x) { asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x)); }
constexpr int VECTOR_BYTES = sizeof(Vector) / 2;  // int8 values that widen to a Vector

// Few rows are bound by memory: they alternate between panels, so that several streams of memory are under way.
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 1; }
// Steps of a panel before its other half, or the next panel, has its turn: they stay in the L1 cache. Four rows are
// bound by arithmetic and gain from fewer turns.
constexpr int64_t block_steps(int rows, int panels) { return panels == 1 ? 128 : rows <= 3 ? 8 : 16; }

// acc [ROWS][VECTORS] += `steps` steps, for WIDTH of the vectors from `first` on. Not inlined: one part takes all
// registers.
template <int ROWS, int WIDTH>
__attribute__((noinline)) void part(const Operand* a, const int8_t* b, int64_t steps, int64_t ahead, Vector* sums,
                                    int first) {
    constexpr int parts = VECTORS / WIDTH;
    const int8_t* fetched = b + ahead + (first ? steps / 2 * PANEL_STEP : 0);
    Vector acc[ROWS][WIDTH];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < WIDTH; ++c)
        acc[r][c] = sums[r * VECTORS + first + c];
    b += first * VECTOR_BYTES;
    for (int64_t s = 0; s < steps; ++s) {
        Vector w[WIDTH];
        LLM_UNROLL for (int c = 0; c < WIDTH; ++c) {
            w[c] = widen_load(b + s * PANEL_STEP + c * VECTOR_BYTES);
            asm("" : "+v"(w[c]));  // or gcc reloads it for every product
        }
        prefetch(fetched + s * (PANEL_STEP / parts));  // each part prefetches its share
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
            const Vector value = broadcast_four(a + (s * ROWS + r) * STEP);
            LLM_UNROLL for (int c = 0; c < WIDTH; ++c) add_to(acc[r][c], multiply(value, w[c]));
        }
    }
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) LLM_UNROLL for (int c = 0; c < WIDTH; ++c)
        sums[r * VECTORS + first + c] = acc[r][c];
}

// Adds the two int32 of each output channel: [VECTORS] vectors -> 16 channels.
LLM_INLINE void add_pairs(const Vector* sums, int32_t* out) {
    alignas(64) int32_t pair[2 * LANES];
    std::memcpy(pair, sums, sizeof pair);
    for (int c = 0; c < LANES; ++c) out[c] = pair[2 * c] + pair[2 * c + 1];
}

template <int ROWS, int PANELS>
void dots(const Operand* a, const int8_t* b, int64_t panel_bytes, int64_t steps, const TileInBlock&, const uint8_t*,
          int32_t* out) {
    constexpr int width = ROWS * VECTORS <= 2 * MAX_ROWS ? VECTORS : 2;
    constexpr int64_t block = block_steps(ROWS, PANELS);
    const Ahead ahead(prefetch_bytes(PANELS), PANEL_STEP, steps, PANELS, panel_bytes);
    Vector sums[PANELS][ROWS * VECTORS];
    for (auto& panel : sums)
        for (Vector& sum : panel) sum = nothing();
    for (int64_t s = 0; s < steps; s += block) {
        const int64_t some = min(block, steps - s);
        for (int c = 0; c < PANELS; ++c)
            LLM_UNROLL for (int first = 0; first < VECTORS; first += width)
                part<ROWS, width>(a + s * ROWS * STEP, b + c * panel_bytes + s * PANEL_STEP, some, ahead.distance(s),
                                  sums[c], first);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < PANELS; ++c) add_pairs(sums[c] + r * VECTORS, out + (r * PANELS + c) * LANES);
}

#endif
#endif

// y = (float(sum) * row scale) * (factor * scale[n]) + bias[n], each product rounded. Dynamic quantization: the factor
// is 1. Static: the factor is input_scale, and row scales are 1, or NaN of a row that is not finite.
struct Int8Product : Product {
    const Operand* a;        // of each tile, [k / 4][rows][4]
    const float* row_scale;  // [m]
    int32_t offset;          // of the operands: `offset` times the column's sum is subtracted
    float factor;

    Int8Product(const Product& product, const Operand* operands, const float* row_scales, int32_t operand_shift)
        : Product(product), a(operands), row_scale(row_scales),
          offset(operand_shift + static_cast<int32_t>(input_offset)), factor(input_scale == 0.0f ? 1.0f : input_scale) {
    }

    int64_t steps() const { return ceil_div(k, STEP); }
    int64_t panel_bytes() const { return steps() * PANEL_STEP; }
    const int8_t* panel(int64_t index) const { return static_cast<const int8_t*>(data) + index * panel_bytes(); }
};

// Sums [rows][stride][16] of `wide` panels -> outputs.
LLM_INLINE void scale_sums(const Int8Product& p, int64_t row, int64_t rows, int64_t panel, int64_t wide, int64_t stride,
                           const int32_t* sums) {
    for (int64_t c = 0; c < wide; ++c) {
        const int64_t column = (panel + c) * LANES;
        alignas(64) int32_t excess[LANES];
        for (int i = 0; i < LANES; ++i)
            excess[i] = static_cast<int32_t>(static_cast<uint32_t>(p.offset) *
                                             static_cast<uint32_t>(p.sums[column + i]));
        const F32 scale = set1(p.factor) * p.scales().load(0, column, p.n - column);
        const I32 its_excess = load_i(excess);
        const float* row_scale = p.row_scale + row;
        p.store_outputs(row, rows, column, [=](int64_t r) {
            const I32 sum = load_i(sums + (r * stride + c) * LANES) - its_excess;
            return to_float(sum) * set1(row_scale[r]) * scale;
        });
    }
}

// `opened`: of int4 with levels, where the first of several row tiles puts these panels unpacked for the others; else
// null.
template <int ROWS, int PANELS>
void tile(const Int8Product& p, int64_t row, int64_t panel, const TileInBlock& in_block, int8_t* opened) {
    alignas(64) int32_t sums[ROWS * PANELS * LANES];
    LLM_UNROLL for (int64_t c = panel; c < panel + PANELS; ++c) {
        prefetch(p.sums + c * LANES);
        p.scales().fetch(0, c * LANES);
    }
    const Operand* a = p.a + row * p.steps() * STEP;
    const int8_t* b = opened ? opened : p.panel(panel);
    const uint8_t* packed = opened ? LevelPanels(p).codes(panel) : nullptr;
    [[maybe_unused]] constexpr bool pairs = PAIRS && ROWS % 2 == 0 && PANELS == 1;
    if (opened && in_block.index == 0) {
#if LLM_DOTS
        if constexpr (!pairs) {
            if (in_block.count > 1) leveled_dots<ROWS, PANELS, true>(a, LevelPanels(p), panel, opened, sums);
            else leveled_dots<ROWS, PANELS, false>(a, LevelPanels(p), panel, opened, sums);
            return scale_sums(p, row, ROWS, panel, PANELS, PANELS, sums);
        }
#endif
        for (int64_t c = 0; c < PANELS; ++c)
            open_levels(LevelPanels(p), panel + c, 0, p.steps() / 2, opened + c * p.panel_bytes());
    }
#if LLM_MMLA
    if constexpr (pairs) paired_dots<ROWS>(a, b, p.panel_bytes(), p.steps(), sums);
    else
#endif
        dots<ROWS, PANELS>(a, b, p.panel_bytes(), p.steps(), in_block, packed, sums);
    scale_sums(p, row, ROWS, panel, PANELS, PANELS, sums);
}

template <int ROWS>
void tiles(const Int8Product& p, int64_t row, int64_t panel, int64_t end, const TileInBlock& in_block, int8_t* opened) {
    for_panels<panels_for(ROWS)>(panel, end, [&](auto wide, int64_t at) {
        tile<ROWS, decltype(wide)::value>(p, row, at, in_block,
                                          opened ? opened + (at - panel) * p.panel_bytes() : nullptr);
    });
}

#if LLM_VNNI

// `input_sums`: of `sum_inputs`, negative.
template <int ROWS>
void few_tiles(const Int8Product& p, const int8_t* a, const int32_t* input_sums, int64_t panel, int64_t end) {
    for_panels<few_panels(ROWS)>(panel, end, [&](auto wide, int64_t at) {
        constexpr int width = decltype(wide)::value;
        alignas(64) int32_t sums[ROWS * width * LANES];
        few_dots<ROWS, width>(a, input_sums, LevelPanels(p), at, sums);
        scale_sums(p, 0, ROWS, at, width, width, sums);
    });
}

#endif

// Quantizes ROWS batch rows of a tile of `rows` to [k / 4][rows][4], and writes the factors of their sums. `rotated`
// [ROWS][k]: room where they are rotated first.
template <int ROWS, class To>
LLM_INLINE void quantize_rows(const Product& p, int64_t row, int64_t rows, To* out, float* factors, float* rotated) {
    const float* x = p.x + row * p.k;
    if (p.rotation) {
        for (int64_t r = 0; r < ROWS; ++r) rotate_row(x + r * p.k, rotated + r * p.k, p.k, p.rotation);
        x = rotated;
    }
    RowQuantizer by[ROWS];
    LLM_UNROLL for (int r = 0; r < ROWS; ++r) {
        by[r] = RowQuantizer(x + r * p.k, p.k, p.input_scale, p.input_offset);
        factors[r] = by[r].factor;
    }
    const auto put = [&](int64_t i, int64_t steps, const auto& load_from) {
        I32 q[ROWS];
        LLM_UNROLL for (int r = 0; r < ROWS; ++r) q[r] = by[r].quantize(load_from(x + r * p.k + i));
        store_steps<STEP>(q, steps, rows, out + i * rows);
    };
    int64_t i = 0;
    for (; i + LANES <= p.k; i += LANES) put(i, LANES / STEP, [](const float* at) { return load(at); });
    if (i < p.k) put(i, ceil_div(p.k - i, STEP), [&](const float* at) { return load_part(at, p.k - i); });
}

#if LLM_TILES

// From this many batch rows on, AMX tiles are faster; the bits are the same.
constexpr int64_t TILES_FROM = 12;

// int4 with levels, unpacked one block of steps of tiles at a time.
struct OpenedTiles {
    const LevelPanels panels;
    static constexpr bool IN_PLACE = false;
    static constexpr int64_t HALF = TILE_LINES / 2;  // steps of 8 k in a step of tiles

    explicit OpenedTiles(const Weight& weight) : panels(weight) {}
    int64_t steps() const { return ceil_div(panels.steps(), HALF); }
    int64_t scratch_bytes(int64_t block) const { return TILE_PANELS * block * TILE_BYTES; }
    int64_t last(int64_t first, int64_t count) const { return min(panels.steps(), (first + count) * HALF); }
    TileSteps open(int64_t panel, int64_t wide, int64_t first, int64_t count, char* scratch) const {
        const int64_t begin = first * HALF, end = last(first, count);
        const int64_t filled = (end - begin) * LevelPanels::OPENED;
        for (int64_t c = 0; c < wide; ++c) {
            char* to = scratch + c * count * TILE_BYTES;
            open_levels(panels, panel + c, begin, end, reinterpret_cast<int8_t*>(to));
            std::memset(to + filled, 0, count * TILE_BYTES - filled);
        }
        return {scratch, count * TILE_BYTES, count, nullptr};
    }
    StoredSteps stored(int64_t panel, int64_t first, int64_t count) const {
        const char* from = reinterpret_cast<const char*>(panels.codes(panel));
        return {from + first * HALF * LevelPanels::CODES, panels.bytes(), last(first, count) - first * HALF};
    }
};

void multiply_by_tiles(const Product& product, int64_t threads) {
    const Scratch scales(product.m * sizeof(float));
    float* row_scales = scales.as<float>();
    const Int8Product p(product, nullptr, row_scales, 0);
    // With more than two row tiles, short blocks pay: panels are read from the L1 cache, and sums are reloaded once
    // more.
    const int64_t block = p.m > 2 * TILE_LINES || p.levels ? SHORT_STEPS : BLOCK_STEPS;
    for_row_blocks(p.m, ceil_div(p.k, LINE), 1, block, MOST_TILES, [&](const TileOperands& a, int64_t from) {
        quantize_operands(a, p.x + from * p.k, p.k, p.rotation, p.input_scale, p.input_offset, row_scales + from,
                          threads);
        const auto done = [&](int64_t tile, int64_t panel, int64_t wide, const char* sums) {
            scale_sums(p, from + tile * TILE_LINES, a.tile_rows(tile), panel, wide, TILE_PANELS,
                       reinterpret_cast<const int32_t*>(sums));
        };
        if (p.levels) return multiply_tiles<INT8>(a, OpenedTiles(p), p.panels(), threads, done);
        const TilePanels panels{static_cast<const char*>(p.data), p.steps()};
        multiply_tiles<INT8>(a, panels, p.panels(), threads, done);
    });
}

#endif

// An output channel (row of W) inside its panel.
struct PanelRow {
    const int8_t* panel;
    PanelRow(const Weight& weight, int64_t row)
        : panel(static_cast<const int8_t*>(weight.data) + row / LANES * ceil_div(weight.k, STEP) * PANEL_STEP +
                row % LANES * STEP) {}
    int8_t operator[](int64_t k) const { return panel[k / STEP * PANEL_STEP + k % STEP]; }
};

#if LLM_VNNI

// int4 with levels and at most FEW_ROWS batch rows.
template <int ROWS> void multiply_few(const Product& product, int64_t threads) {
    const LevelPanels b(product);
    const int64_t padded = b.steps() * 2 * STEP, parts = b.groups * chunks(b);
    const Scratch operands(ROWS * padded), memory((ROWS + ROWS * parts) * sizeof(float)),
        room(product.rotation ? ROWS * product.k * sizeof(float) : 0);
    int8_t* a = operands.as<int8_t>();
    float* row_scales = memory.as<float>();
    int32_t* input_sums = reinterpret_cast<int32_t*>(row_scales + ROWS);
    for (int64_t r = 0; r < ROWS; ++r)
        quantize_rows<1>(product, r, ROWS, a + r * STEP, row_scales + r, room.as<float>());
    sum_inputs<ROWS>(a, b, input_sums);
    for (int64_t i = 0; i < ROWS * parts; ++i) input_sums[i] = -input_sums[i];
    const Int8Product p(product, nullptr, row_scales, 0);
    const Tasks tasks(ROWS, p.n, ROWS, padded, BLOCK_BYTES, threads);
    tasks.run([&](int64_t, int64_t panel, int64_t end) { few_tiles<ROWS>(p, a, input_sums, panel, end); });
}

#endif

}  // namespace

void linear_int8(const Weight& weight, const float* x, float* y, int64_t m, int64_t threads) {
    const Product product{weight, x, y, m};
#if LLM_VNNI
    if (weight.levels && !weight.input_scale && m <= FEW_ROWS) {
        if (m == 0) return;
        if (m == 1) return multiply_few<1>(product, threads);
        if (m == 2) return multiply_few<2>(product, threads);
#if LLM_AVX512
        if (m == 3) return multiply_few<3>(product, threads);
        return multiply_few<4>(product, threads);
#endif
    }
#endif
#if LLM_TILES
    if (m >= TILES_FROM) return multiply_by_tiles(product, threads);
#endif
    const int64_t k = weight.k, padded = ceil_div(k, STEP) * STEP;
    const Scratch operands(m * padded * sizeof(Operand)), scales(m * sizeof(float));
    Operand* a = operands.as<Operand>();
    float* row_scales = scales.as<float>();
    const Tasks tasks(m, weight.n, MAX_ROWS, padded * sizeof(Operand), BLOCK_BYTES, threads);
    const int64_t quantizing = m * k < SERIAL_ELEMENTS ? 1 : threads;
    constexpr int at_once = ROWS_AT_ONCE<Operand>;
    const int64_t rotated_bytes = weight.rotation ? at_once * k * sizeof(float) : 0;
    tasks.for_rows<at_once>(quantizing, rotated_bytes, [&](auto count, int64_t tile, int64_t r, char* scratch) {
        const int64_t first = tasks.first_row(tile), row = first + r;
        quantize_rows<decltype(count)::value>(product, row, tasks.rows(tile), a + first * padded + r * STEP,
                                              row_scales + row, reinterpret_cast<float*>(scratch));
    });
    const Int8Product p(product, a, row_scales, OPERAND_SHIFT);
    const auto nothing = [](int64_t, int64_t, char*) {};
    const int64_t opened_bytes = weight.levels ? tasks.group_panels() * p.panel_bytes() : 0;
    tasks.run(opened_bytes, nothing, [&](int64_t tile, int64_t panel, int64_t end, char* scratch) {
        int8_t* opened = weight.levels ? reinterpret_cast<int8_t*>(scratch) : nullptr;
        with_rows(tasks.rows(tile), [&](auto rows) {
            tiles<decltype(rows)::value>(p, tasks.first_row(tile), panel, end, tasks.in_block(tile), opened);
        });
    });
}

void pack_int8(const int8_t* src, int8_t* dst, int32_t* sums, int64_t n, int64_t k, int64_t threads) {
    const int64_t bytes = ceil_div(k, STEP) * PANEL_STEP;
    parallel_for(ceil_div(n, LANES), threads, 0, [&](int64_t panel, char*) {
        const int8_t* from = src + panel * LANES * k;
        const int64_t rows = min(LANES, n - panel * LANES);
        interleave<uint32_t>(reinterpret_cast<const char*>(from), k, rows,
                             reinterpret_cast<char*>(dst + panel * bytes));
        for (int64_t row = 0; row < LANES; ++row) {
            int32_t sum = 0;
            for (int64_t i = 0; row < rows && i < k; ++i) sum += from[row * k + i];
            sums[panel * LANES + row] = sum;
        }
    });
}

// `sums` of int4 with levels, as pack_int8 has them.
void sum_levels(const Weight& weight, int32_t* sums, int64_t threads) {
    const LevelPanels packed(weight);
    const int64_t bytes = packed.steps() * LevelPanels::OPENED;
    parallel_for(ceil_div(weight.n, LANES), threads, bytes, [&](int64_t panel, char* scratch) {
        int8_t* opened = reinterpret_cast<int8_t*>(scratch);
        open_levels(packed, panel, 0, packed.steps(), opened);
        int32_t total[LANES] = {};
        for (int64_t i = 0; i < bytes; i += PANEL_STEP)
            for (int64_t c = 0; c < LANES; ++c)
                for (int64_t j = 0; j < STEP; ++j) total[c] += opened[i + c * STEP + j];
        std::memcpy(sums + panel * LANES, total, sizeof total);
    });
}

void unpack_int8(const Weight& weight, int8_t* dst, int64_t first, int64_t end, int64_t threads) {
    parallel_for(end - first, threads, 0, [&](int64_t index, char*) {
        const PanelRow row(weight, first + index);
        for (int64_t i = 0; i < weight.k; ++i) dst[index * weight.k + i] = row[i];
    });
}

}  // namespace llm

using namespace llm;

// x [m, k] -> q [m, k] and each row's scale.
LLM_EXPORT void llm_quantize_per_token(const float* x, int8_t* q, float* scale, int64_t m, int64_t k, int64_t threads) {
    parallel_for(m, m * k < SERIAL_ELEMENTS ? 1 : threads, 0, [&](int64_t row, char*) {
        scale[row] = row_scale(x + row * k, k);
        const Quantizer quantize(scale[row]);
        alignas(16) int8_t out[LANES];
        for (int64_t i = 0; i < k; i += LANES) {
            store_int8(out, quantize(load_part(x + row * k + i, k - i)));
            std::memcpy(q + row * k + i, out, min(k - i, LANES));
        }
    });
}

LLM_EXPORT void llm_quantize_static(const float* x, int8_t* q, float scale, int64_t offset, int64_t count,
                                    int64_t threads) {
    constexpr int64_t chunk = 1 << 12;
    parallel_for(ceil_div(count, chunk), threads, 0, [&](int64_t index, char*) {
        const int64_t end = min(count, (index + 1) * chunk);
        const Quantizer quantize(scale, offset);
        alignas(16) int8_t out[LANES];
        for (int64_t i = index * chunk; i < end; i += LANES) {
            store_int8(out, quantize(load_part(x + i, end - i)));
            std::memcpy(q + i, out, min(LANES, end - i));
        }
    });
}

// The sums [n, padded to panels] of the rows of a weight of int4 with levels, as integers of 8 bits.
LLM_EXPORT void llm_level_sums(const Weight* weight, int32_t* sums, int64_t threads) {
    sum_levels(*weight, sums, threads);
}

LLM_KERNEL(llm_level_sums)
LLM_KERNEL(llm_quantize_per_token)
LLM_KERNEL(llm_quantize_static)
