// Unpacks int4 with two levels of scales to int8: v = (w + 8) * step - shift, whole numbers of 8 bits.
//
// Beside the panel (int4.h) each group has [16] bytes: an output channel's step in the low nibble, its place in the
// high one; shift = step * (place + 16) * 5 / 16, rounded down. The product of two nibbles is a byte, so a product of
// 16 bits holds those of two codes of a channel. Differences are modulo 256, and exact, as v has 8 bits. An int4 step,
// 8 k, becomes two steps of an int8 panel, [2][16][4].
#pragma once

#include "bytes.h"
#include "weight.h"

namespace llm {
namespace {

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

}  // namespace
}  // namespace llm
